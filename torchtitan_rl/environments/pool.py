"""The environments of one engine's conversations. They run in their own threads, under time and size limits."""

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.conversation import Answer, Conversation
from torchtitan_rl.data.template import ChatTemplate
from torchtitan_rl.data.turns import Environment, Message, Turn
from torchtitan_rl.environments.checks import (
    Context,
    checked_messages,
    checked_reward,
    checked_turn,
    described,
    escaped,
)
from torchtitan_rl.environments.threads import CallResult, Worker, resolve
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.text import head_and_tail
from torchtitan_rl.types import FinishReason, Prompt, Trace, TurnRecord

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000
"""Maximum length of an exception's text in messages. Some exceptions quote their whole input."""

CLOSE_SECONDS = 30.0
"""Maximum time that a call's end waits for environments to close."""

Make = Callable[[], Environment | None]


class ConversationError(TrainingStopped):
    """An environment raised, timed out, or returned an invalid value."""


class EnvironmentSession:
    """The environment of one conversation. `open`, `step` and `close` run in the conversation's own thread."""

    def __init__(
        self,
        conversation: Conversation,
        make: Make,
        template: ChatTemplate,
        limits: Configurable.Config,
    ) -> None:
        self.conversation = conversation
        self.worker = Worker()
        self.ends_at = time.monotonic() + (limits.time_limit_seconds or math.inf)
        self._make = make
        self._environment: Environment | None = None
        self._kind = "the environment"
        self._templates = [template]
        """That of each trace."""
        self._limits = limits

    def open(self, index: int) -> Answer:
        """Makes and resets the environment. Returns the prompt with the environment's first messages appended."""
        prompt = self.conversation.prompt
        self._environment = self._make()
        if self._environment is None:
            return Answer(index)
        self._kind = f"environment {type(self._environment).__name__}"
        opening = resolve(self._environment.reset())
        opening_messages = checked_messages(opening, self._limits.max_answer_characters)
        before = prompt.messages
        if isinstance(opening, Context):
            before = []
            if opening.tools is not None:
                self._templates = [self._templates[0].with_tools(opening.tools)]
        room = self.conversation.room()
        if opening_messages:
            text, token_ids = self._templates[0].prompt(before, opening_messages)
            room = self.conversation.room(len(token_ids) - len(prompt.token_ids))
            prompt = replace(
                prompt, messages=[*before, *opening_messages], text=text, token_ids=token_ids
            )
        if room <= 0:
            self.close("max_tokens")
            return Answer(index, prompt=prompt, end="max_tokens")
        return Answer(index, prompt=prompt, grammar=self._environment.grammar)

    def step(self, index: int) -> Answer:
        """Passes the policy's last turn to the environment and returns its answer; closes it at the last turn."""
        began = time.monotonic()
        cut = self.conversation.last.finish_reason == "length"
        turn = Turn(done=True) if cut else self._call_step()
        follows = {"end": "max_tokens"} if cut else self._what_follows(turn)
        final = self.close(follows["end"]) if "end" in follows else None
        given = [reward for reward in (turn.reward, final) if reward is not None]
        record = self.record(
            messages=() if isinstance(turn.messages, Context) else turn.messages,
            reward=sum(given) if given else None,
            columns=turn.columns,
            environment_seconds=time.monotonic() - began,
        )
        return Answer(index, record, **follows)

    def close(self, reason: FinishReason) -> float | None:
        """Closes the environment, unless it is closed, and returns its final reward."""
        environment, self._environment = self._environment, None
        return None if environment is None else checked_reward(resolve(environment.close(reason)))

    @property
    def name(self) -> str:
        """The environment, prompt, sample and turn, for error messages."""
        conversation = self.conversation
        who = f"{self._kind} of prompt {conversation.prompt.text[-80:]!r}, sample {conversation.sample_idx}"
        if conversation.last is None:
            return f"The reset of {who},"
        return f"{who[0].upper()}{who[1:]}, in turn {len(conversation.turns) + 1},"

    def record(self, **facts: Any) -> TurnRecord:
        """Returns the record of the policy's last turn, with these fields of the answer."""
        last = self.conversation.last
        return TurnRecord(
            text=last.text, num_tokens=len(last.token_ids), trace=self.conversation.current, **facts
        )

    def _call_step(self) -> Turn:
        last = self.conversation.last
        text = (
            self._templates[0].policy_text(last.token_ids)
            if self._environment.special_tokens
            else last.text
        )
        message: Message = {"role": "assistant", "content": text}
        return checked_turn(
            resolve(self._environment.step(message)), self._limits.max_answer_characters
        )

    def _what_follows(self, turn: Turn) -> dict[str, Any]:
        """Fields of the `Answer`: the tokens that the policy reads next and their trace, or why the conversation is over."""
        conversation = self.conversation
        if turn.done:
            return {"end": turn.finish_reason}
        if len(conversation.turns) + 1 >= self._limits.max_turns:
            return {"end": "max_turns"}
        if time.monotonic() > self.ends_at:
            return {"end": "time"}
        if isinstance(turn.messages, Context):
            return self._new_trace(turn.messages)
        trace = conversation.current if turn.trace is None else turn.trace
        if not 0 <= trace < len(self._templates):
            raise ValueError(
                f"step returned the trace {trace}; expected one of the {len(self._templates)} so far"
            )
        token_ids = self._templates[trace].answer(
            turn.messages, conversation.traces[trace].token_ids[-1]
        )
        if conversation.room(len(token_ids), trace=trace) <= 0:
            return {"end": "max_tokens"}
        return {"token_ids": token_ids, "trace": trace, "grammar": self._environment.grammar}

    def _new_trace(self, context: Context) -> dict[str, Any]:
        """Fields of the `Answer` that opens a trace, or why the conversation is over."""
        number = len(self._templates)
        if number >= self._limits.max_traces:
            return {"end": "max_traces"}
        parent = self.conversation.current if context.parent is None else context.parent
        template = self._templates[parent]
        if context.tools is not None:
            template = template.with_tools(context.tools)
        _, token_ids = template.prompt([], context)
        if self.conversation.room(len(token_ids), trace=number) <= 0:
            return {"end": "max_tokens"}
        self._templates.append(template)
        origin = Trace(
            context_tokens=len(token_ids),
            parent=parent,
            reason=context.reason,
            messages=tuple(context),
        )
        return {
            "token_ids": token_ids,
            "trace": number,
            "origin": origin,
            "grammar": self._environment.grammar,
        }


class _Overdue(Exception):
    """Stands in for the result of a call that timed out."""


class EnvironmentPool:
    """Runs environments, each in its own thread, and collects their answers. `index` is the conversation's in the call.

    At most `max_open` environments are open at once. The next one is made when another has been closed.
    """

    def __init__(self, limits: Configurable.Config) -> None:
        self._limits = limits
        self._call_seconds = limits.call_seconds or math.inf
        self._has_warned = False
        self.indices: list[int] = []
        """Conversations that were added."""
        self._waiting: deque[tuple[int, Conversation, Make, ChatTemplate]] = deque()
        self._sessions: dict[int, EnvironmentSession] = {}
        self._due: dict[int, float] = {}
        """{index: deadline of the call under way, in `time.monotonic()` seconds}"""
        self._closing: dict[int, tuple[float, EnvironmentSession]] = {}
        """{index: deadline of the close under way, the session}"""
        self._results: queue.SimpleQueue[tuple[int, bool, CallResult]] = queue.SimpleQueue()
        """(index, whether it was closed, result) of each call that has returned."""
        self._resets: dict[int, deque[int]] = {}
        """{prompt_idx: indices whose resets have not been answered, in the order of the samples}"""
        self._reset_results: dict[int, CallResult] = {}
        """Results that wait for the reset of an earlier sample of the prompt."""
        self._first: dict[int, Prompt] = {}
        """{prompt_idx: the prompt after its first reset}"""

    def add(
        self, index: int, conversation: Conversation, make: Make, template: ChatTemplate
    ) -> None:
        """Adds a conversation. `make` is called in the conversation's thread, when there is room; then comes the reset."""
        self.indices.append(index)
        self._waiting.append((index, conversation, make, template))
        self._resets.setdefault(conversation.prompt.prompt_idx, deque()).append(index)
        self._open_waiting()

    def step_async(self, index: int) -> None:
        """Starts the environment's step on the policy's last turn."""
        session = self._sessions[index]
        self._call(index, lambda: session.step(index))

    def answers(self, *, wait: bool, all: bool) -> list[Answer]:
        """Returns the answers that have arrived, sorted by index.

        `wait`: at least one. `all`: every outstanding one.
        """
        answers: list[Answer] = []
        while True:
            self._open_waiting()
            missing = wait and not answers and bool(self._due or self._waiting)
            blocks = missing or (all and bool(self._due))
            arrived = self._arrived(blocks=blocks)
            for index, result in arrived:
                answers += self._answers(index, result)
            if not arrived and not blocks:
                return sorted(answers, key=lambda answer: answer.conversation_idx)

    def close(self) -> None:
        """Closes every environment that is open. Waits for it up to `CLOSE_SECONDS`, but not for calls that timed out."""
        self._waiting.clear()
        for index in list(self._sessions):
            self._start_close(index, "env_error")
        self._due.clear()
        while self._closing:
            self._arrived(blocks=True)

    def _open_waiting(self) -> None:
        while self._waiting and len(self._sessions) + len(self._closing) < self._limits.max_open:
            index, conversation, make, template = self._waiting.popleft()
            session = self._sessions[index] = EnvironmentSession(
                conversation, make, template, self._limits
            )
            self._call(index, lambda session=session, index=index: session.open(index))

    def _answers(self, index: int, result: CallResult) -> list[Answer]:
        """The answers that this result gives. Resets of a prompt are answered in the order of its samples."""
        resets = self._resets[self._sessions[index].conversation.prompt.prompt_idx]
        if index not in resets:
            return [self._answer(index, result)]
        self._reset_results[index] = result
        answers = []
        while resets and resets[0] in self._reset_results:
            index = resets.popleft()
            answers.append(
                self._answer(index, self._same_reset(index, self._reset_results.pop(index)))
            )
        return answers

    def _same_reset(self, index: int, result: CallResult) -> CallResult:
        """The result of a reset, or an error if other samples of the prompt have seen other messages."""
        if result.error is not None or result.value.prompt is None:
            return result
        prompt = result.value.prompt
        first = self._first.setdefault(prompt.prompt_idx, prompt)
        if (first.messages, first.text) == (prompt.messages, prompt.text):
            return result
        return CallResult(
            error=ValueError(
                "reset returned other messages than for another sample of the same prompt"
            )
        )

    def _answer(self, index: int, result: CallResult) -> Answer:
        session = self._sessions[index]
        if result.error is None:
            if result.value.end is not None or (
                result.value.turn is None and result.value.prompt is None
            ):
                self._sessions.pop(index).worker.close()
            return result.value
        is_reset = session.conversation.last is None
        facts = {"prompt": session.conversation.prompt} if is_reset else {"turn": session.record()}
        if isinstance(result.error, _Overdue) and time.monotonic() >= session.ends_at:
            self._start_close(index, "time", waits=False)
            return Answer(index, end="time", **facts)
        return Answer(index, end="env_error", error=self._failed(index, result.error), **facts)

    def _failed(self, index: int, error: BaseException) -> str:
        """Closes the environment and returns a description of the error.

        Raises ConversationError if on_failure is raise.
        """
        overdue = isinstance(error, _Overdue)
        limit = f"took longer than conversations.call_seconds, {self._call_seconds:g} s"
        reason = (
            limit
            if overdue
            else head_and_tail(escaped(described(error)), ERROR_CHARACTERS) + users_line(error)
        )
        failed = f"{self._sessions[index].name} failed: {reason}."
        self._start_close(index, "env_error", waits=not overdue)
        if self._limits.on_failure == "raise":
            raise ConversationError(
                f"{failed} Correct it, or set conversations.on_failure none to continue without a reward for such "
                "samples."
            ) from (None if overdue else error)
        self._warn(
            f"{failed} Such samples get no reward; the metric conversations/env_errors counts them."
        )
        return reason

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning(text)
        self._has_warned = True

    def _call(self, index: int, function: Callable[[], Answer]) -> None:
        session = self._sessions[index]
        self._due[index] = min(time.monotonic() + self._call_seconds, session.ends_at)
        session.worker.call(function, lambda result: self._results.put((index, False, result)))

    def _start_close(self, index: int, reason: FinishReason, *, waits: bool = True) -> None:
        """Starts closing an environment. It counts as open until it is closed or late, unless `waits` is False."""
        session = self._sessions.pop(index)
        if waits:
            deadline = time.monotonic() + min(self._call_seconds, CLOSE_SECONDS)
            self._closing[index] = (deadline, session)
        session.worker.call(
            lambda: session.close(reason), lambda result: self._results.put((index, True, result))
        )
        session.worker.close()

    def _arrived(self, *, blocks: bool) -> list[tuple[int, CallResult]]:
        """Returns the results of calls by index, with `_Overdue` for those that timed out; later results are ignored.

        With `blocks` it waits until anything happens: a result, a timeout or the end of a close.
        """
        deadlines = [*self._due.values(), *(deadline for deadline, _ in self._closing.values())]
        left = min(deadlines, default=math.inf) - time.monotonic() if blocks else 0
        found: dict[int, CallResult] = {}
        while True:
            try:
                index, was_close, result = self._results.get(timeout=min(max(left, 0), 60))
            except queue.Empty:
                break
            left = 0
            if was_close:
                self._closed(index, result)
            elif self._due.pop(index, None) is not None:
                found[index] = result
        now = time.monotonic()
        for index in [index for index, (deadline, _) in self._closing.items() if deadline <= now]:
            self._closed(index, CallResult(error=TimeoutError("took too long")))
        for index in [index for index, deadline in self._due.items() if deadline <= now]:
            del self._due[index]
            found[index] = CallResult(error=_Overdue())
        return sorted(found.items())

    def _closed(self, index: int, result: CallResult) -> None:
        _, session = self._closing.pop(index, (0, None))
        if session is not None and result.error is not None:
            self._warn(f"{session.name} failed to close: {described(result.error)}.")
