"""The environments of one engine's conversations. They run in their own threads, under time and size limits."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchtitan_rl.conversation import Answer, Conversation
from torchtitan_rl.data.template import ChatTemplate
from torchtitan_rl.data.turns import Environment, Turn
from torchtitan_rl.environments.checks import (
    Context,
    checked_messages,
    checked_reward,
    checked_turn,
    described,
    escaped,
)
from torchtitan_rl.environments.conversations_config import ConversationsConfig
from torchtitan_rl.environments.threads import Worker, resolve
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.rewards.scorer import ERROR_CHARACTERS
from torchtitan_rl.text import head_and_tail
from torchtitan_rl.types import FinishReason, Prompt, Trace, TurnRecord

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""Maximum time that a call's end waits for environments to close."""

Make = Callable[[], Environment | None]


class ConversationError(TrainingStopped):
    """An environment raised, timed out, or returned an invalid value."""


@dataclass(eq=False)
class EnvironmentSession:
    """The environment of one conversation. `open`, `step` and `close` run in the conversation's own thread."""

    conversation: Conversation
    make: Make
    templates: list[ChatTemplate]
    """That of each trace."""
    limits: ConversationsConfig
    prompts_may_differ: bool = field(default=False, init=False)
    """The environment's."""

    def __post_init__(self) -> None:
        self.worker = Worker()
        self.ends_at = time.monotonic() + (self.limits.time_limit_seconds or math.inf)
        self.call: Future[Any] | None = None
        """The one under way, until its deadline."""
        self.is_closing = False
        """Whether that call closes the environment."""
        self.deadline = self.left_at = 0.0
        """In `time.monotonic()` seconds, like `ends_at`. `left_at`: when a pool has left it for the next one."""
        self._environment: Environment | None = None
        self._kind = "the environment"

    def open(self) -> Answer:
        """Makes and resets the environment. Returns the prompt with the environment's first messages appended."""
        prompt = self.conversation.prompt
        self._environment = self.make()
        if self._environment is None:
            return Answer()
        self._kind = f"environment {type(self._environment).__name__}"
        self.prompts_may_differ = self._environment.prompts_may_differ
        opening = resolve(self._environment.reset())
        opening_messages = checked_messages(opening, self.limits.max_answer_characters)
        before, tools = prompt.messages, prompt.tools
        if isinstance(opening, Context):
            before = []
            if opening.tools is not None:
                tools = opening.tools
                self.templates = [self.templates[0].with_tools(opening.tools)]
        if opening_messages:
            text, token_ids = self.templates[0].prompt(before, opening_messages)
            messages = [*before, *opening_messages]
            prompt = replace(prompt, messages=messages, tools=tools, text=text, token_ids=token_ids)
        more = len(prompt.token_ids) - len(self.conversation.prompt.token_ids)
        if self.conversation.room(more) <= 0:
            self.close("max_tokens")
            return Answer(prompt=prompt, end="max_tokens")
        return Answer(prompt=prompt, grammar=self._environment.grammar)

    def step(self) -> Answer:
        """Passes the policy's last turn to the environment and returns its answer; closes it at the last turn."""
        began = time.monotonic()
        cut = self.conversation.last.finish_reason == "length"
        turn = Turn(done=True) if cut else self._call_step()
        follows = {"end": "max_tokens"} if cut else self._what_follows(turn)
        final = self.close(follows["end"]) if "end" in follows else None
        rewards = [reward for reward in (turn.reward, final) if reward is not None]
        record = self.record(
            messages=() if isinstance(turn.messages, Context) else turn.messages,
            reward=sum(rewards) if rewards else None,
            columns=turn.columns,
            environment_seconds=time.monotonic() - began,
        )
        return Answer(turn=record, **follows)

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
        last, trace = self.conversation.last, self.conversation.current
        return TurnRecord(text=last.text, num_tokens=len(last.token_ids), trace=trace, **facts)

    def _call_step(self) -> Turn:
        last = self.conversation.last
        text = last.text
        if self._environment.special_tokens:
            text = self.templates[0].policy_text(last.token_ids)
        turn = resolve(self._environment.step({"role": "assistant", "content": text}))
        return checked_turn(turn, self.limits.max_answer_characters)

    def _what_follows(self, turn: Turn) -> dict[str, Any]:
        """Fields of the `Answer`: the tokens that the policy reads next and their trace, or why the conversation is over."""
        conversation = self.conversation
        if turn.done:
            return {"end": turn.finish_reason}
        if len(conversation.turns) + 1 >= self.limits.max_turns:
            return {"end": "max_turns"}
        if time.monotonic() > self.ends_at:
            return {"end": "time"}
        if isinstance(turn.messages, Context):
            if len(self.templates) >= self.limits.max_traces:
                return {"end": "max_traces"}
            follows = self._new_trace(turn.messages)
        else:
            trace = conversation.current if turn.trace is None else turn.trace
            if not 0 <= trace < len(self.templates):
                expected = f"one of the {len(self.templates)} so far"
                raise ValueError(f"step returned the trace {trace}; expected {expected}")
            last_token = conversation.traces[trace].token_ids[-1]
            token_ids = self.templates[trace].answer(turn.messages, last_token)
            follows = {"token_ids": token_ids, "trace": trace}
        if conversation.room(len(follows["token_ids"]), trace=follows["trace"]) <= 0:
            return {"end": "max_tokens"}
        return {**follows, "grammar": self._environment.grammar}

    def _new_trace(self, context: Context) -> dict[str, Any]:
        """Fields of the `Answer` that opens a trace."""
        parent = self.conversation.current if context.parent is None else context.parent
        template = self.templates[parent]
        if context.tools is not None:
            template = template.with_tools(context.tools)
        self.templates.append(template)
        _, token_ids = template.prompt([], context)
        size, messages = len(token_ids), tuple(context)
        origin = Trace(context_tokens=size, parent=parent, reason=context.reason, messages=messages)
        return {"token_ids": token_ids, "trace": len(self.templates) - 1, "origin": origin}


class EnvironmentPool:
    """Runs environments, each in its own thread, and collects their answers. `index` is the conversation's in the call.

    At most `max_open` environments are open at once. The next one is made when another has been closed.
    """

    def __init__(
        self, limits: ConversationsConfig, left: dict[Conversation, EnvironmentSession]
    ) -> None:
        """`left`: where `leave` puts the open environments, and `take` finds them."""
        self._limits, self._left = limits, left
        self._call_seconds = limits.call_seconds or math.inf
        self._close_seconds = min(self._call_seconds, CLOSE_SECONDS)
        self._has_warned = False
        self.indices: set[int] = set()
        """Conversations that were added."""
        self._waiting: deque[tuple[int, Conversation, Make, ChatTemplate]] = deque()
        self._sessions: dict[int, EnvironmentSession] = {}
        """Those that are open, by index."""
        self._first: dict[int, Prompt] = {}
        """{prompt_idx: the prompt after its first reset}"""

    def add(
        self, index: int, conversation: Conversation, make: Make, template: ChatTemplate
    ) -> None:
        """Adds a conversation. `make` is called in the conversation's thread, when there is room; then comes the reset."""
        self.indices.add(index)
        self._waiting.append((index, conversation, make, template))
        self._open_waiting()

    def take(self, index: int, conversation: Conversation) -> None:
        """Adds a conversation that another pool has left. The time between the two counts for no limit."""
        session = self._left.pop(conversation)
        pause = time.monotonic() - session.left_at
        session.ends_at += pause
        session.deadline += pause
        self.indices.add(index)
        self._sessions[index] = session
        if session.call is None and conversation.waits:  # after a resume
            self.step_async(index)
        if conversation.in_turns:
            self._first.setdefault(conversation.prompt.prompt_idx, conversation.prompt)

    def leave(self) -> None:
        """Takes the open environments out of the pool, for a pool that takes them."""
        for index, session in list(self._sessions.items()):
            if not session.is_closing:
                session.left_at = time.monotonic()
                self._left[session.conversation] = self._sessions.pop(index)

    def step_async(self, index: int) -> None:
        """Starts the environment's step on the policy's last turn."""
        self._call(index, self._sessions[index].step)

    def answers(self, *, wait: bool, all: bool) -> list[Answer]:
        """Returns the answers that have arrived, sorted by index. `wait`: at least one. `all`: every outstanding one."""
        answers: list[Answer] = []
        while True:
            self._open_waiting()
            is_due = any(one.call and not one.is_closing for one in self._sessions.values())
            missing = wait and not answers and (is_due or bool(self._waiting))
            blocks = missing or (all and is_due)
            ended = self._ended(blocks=blocks)
            for index, session in ended:
                if session.is_closing:
                    self._closed(index)
                else:
                    answers.append(self._answer(index))
            if not ended and not blocks:
                return sorted(answers, key=lambda answer: answer.conversation_idx)

    def close(self) -> None:
        """Closes every environment that is open. Waits for it up to `CLOSE_SECONDS`, but not for calls that timed out."""
        self._waiting.clear()
        for index, session in self._sessions.items():
            if not session.is_closing:
                self._start_close(index, "env_error")
        while self._sessions:
            for index, _ in self._ended(blocks=True):
                self._closed(index)

    def _open_waiting(self) -> None:
        while self._waiting and len(self._sessions) < self._limits.max_open:
            index, conversation, make, template = self._waiting.popleft()
            session = EnvironmentSession(conversation, make, [template], self._limits)
            self._sessions[index] = session
            self._call(index, session.open)

    def _call(self, index: int, method: Callable[[], Answer]) -> None:
        session = self._sessions[index]
        session.deadline = min(time.monotonic() + self._call_seconds, session.ends_at)
        session.call = session.worker.call(method)

    def _ended(self, *, blocks: bool) -> list[tuple[int, EnvironmentSession]]:
        """Returns the environments whose call has returned or is overdue, by index. With `blocks` it waits for the first."""
        called = [(i, session) for i, session in sorted(self._sessions.items()) if session.call]
        if blocks and called:
            left = min(session.deadline for _, session in called) - time.monotonic()
            calls = [session.call for _, session in called]
            wait_for(calls, min(max(left, 0), 60), FIRST_COMPLETED)
        now = time.monotonic()
        return [(i, one) for i, one in called if one.call.done() or one.deadline <= now]

    def _answer(self, index: int) -> Answer:
        """Takes the answer of a call that has returned or is overdue."""
        session = self._sessions[index]
        call, session.call = session.call, None
        is_overdue = not call.done()
        error = None if is_overdue else call.exception()
        if not is_overdue and error is None:
            answer: Answer = call.result()._replace(conversation_idx=index)
            error = None if session.prompts_may_differ else self._differs(answer)
            if error is None:
                has_none = answer.turn is None and answer.prompt is None
                if answer.end is not None or has_none:
                    self._sessions.pop(index).worker.close()
                return answer
        is_reset = session.conversation.last is None
        facts = {"prompt": session.conversation.prompt} if is_reset else {"turn": session.record()}
        if is_overdue and time.monotonic() >= session.ends_at:
            self._start_close(index, "time", waits=False)
            return Answer(index, end="time", **facts)
        return Answer(index, end="env_error", error=self._failed(index, error), **facts)

    def _differs(self, answer: Answer) -> ValueError | None:
        """Returns an error if a reset gave other messages than the first one of the same prompt."""
        prompt = answer.prompt
        if prompt is None:
            return None
        first = self._first.setdefault(prompt.prompt_idx, prompt)
        if (first.messages, first.text) == (prompt.messages, prompt.text):
            return None
        return ValueError(
            "reset returned other messages than for another sample of the same prompt; set prompts_may_differ if it is meant to"
        )

    def _failed(self, index: int, error: BaseException | None) -> str:
        """Closes the environment and returns a description of the error; None: its call is overdue.

        Raises ConversationError if on_failure is raise.
        """
        if error is None:
            reason = f"took longer than conversations.call_seconds, {self._call_seconds:g} s"
        else:
            text = head_and_tail(escaped(described(error)), ERROR_CHARACTERS)
            reason = text + users_line(error)
        failed = f"{self._sessions[index].name} failed: {reason}."
        self._start_close(index, "env_error", waits=error is not None)
        if self._limits.on_failure == "raise":
            raise ConversationError(
                f"{failed} Correct it, or set conversations.on_failure none to continue without a reward for such "
                "samples."
            ) from error
        self._warn(f"{failed} Such samples get no reward: see conversations/env_errors.")
        return reason

    def _start_close(self, index: int, reason: FinishReason, *, waits: bool = True) -> None:
        """Starts closing an environment. It counts as open until it is closed or late, unless `waits` is False."""
        session = self._sessions[index]
        session.is_closing, session.call = True, session.worker.call(partial(session.close, reason))
        session.deadline = time.monotonic() + self._close_seconds
        session.worker.close()
        if not waits:
            del self._sessions[index]

    def _closed(self, index: int) -> None:
        session = self._sessions.pop(index)
        error = TimeoutError(f"took longer than {self._close_seconds:g} s")
        if session.call.done():
            error = session.call.exception()
        if error is not None:
            self._warn(f"{session.name} failed to close: {described(error)}.")

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning(text)
        self._has_warned = True
