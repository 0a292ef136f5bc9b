"""The environments of one engine's conversations. They run in their own threads, under time and size limits."""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchtitan_rl.core.errors import TrainingStopped
from torchtitan_rl.core.generator.conversation import Answer, Conversation, ResetResult
from torchtitan_rl.core.generator.environment import Environment, Message, Turn
from torchtitan_rl.core.text import head_and_tail
from torchtitan_rl.core.types import FinishReason, Prompt, TurnRecord
from torchtitan_rl.library.environments.checks import checked_messages, checked_reward, checked_turn
from torchtitan_rl.library.environments.template import ChatTemplate
from torchtitan_rl.library.environments.threads import CallResult, Worker, resolve

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000
"""Maximum length of an exception's text in messages. Some exceptions quote their whole input."""


class ConversationError(TrainingStopped):
    """An environment raised, timed out, or returned an invalid value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one conversation. An infinite time means no limit."""

    turns: int
    """Turns of the policy."""
    seconds: float
    """Time of the whole conversation."""
    call_seconds: float
    """Time of one call of the environment."""
    answer_characters: int
    """Length of one message from the environment."""


class EnvironmentSession:
    """The environment of one conversation. `reset`, `step` and `close` run in the conversation's own thread."""

    def __init__(
        self,
        place: int,
        conversation: Conversation,
        environment: Environment,
        template: ChatTemplate,
        worker: Worker,
        limits: Limits,
    ) -> None:
        self.place = place
        self.conversation = conversation
        self.worker = worker
        self.ends_at = time.monotonic() + limits.seconds
        self._environment = environment
        self._template = template
        self._limits = limits

    def reset(self) -> Prompt:
        """Resets the environment. Returns the prompt with the environment's first messages appended."""
        prompt = self.conversation.prompt
        opening_messages = checked_messages(resolve(self._environment.reset()), self._limits.answer_characters)
        if not opening_messages:
            return prompt
        text, token_ids = self._template.prompt(prompt.messages, opening_messages)
        return replace(prompt, messages=[*prompt.messages, *opening_messages], text=text, token_ids=token_ids)

    def step(self) -> Answer:
        """Passes the policy's last turn to the environment and returns its answer; closes it at the last turn."""
        began = time.monotonic()
        cut = self.conversation.last.finish_reason == "length"
        turn = Turn(done=True) if cut else self._call_step()
        token_ids, end = ([], "max_tokens") if cut else self._next_tokens(turn)
        final = self.close(end) if end else None
        given = [reward for reward in (turn.reward, final) if reward is not None]
        record = self.record(
            messages=turn.messages,
            reward=sum(given) if given else None,
            columns=turn.columns,
            environment_seconds=time.monotonic() - began,
        )
        return Answer(self.place, record, token_ids, end)

    def close(self, reason: FinishReason) -> float | None:
        """Closes the environment and returns its final reward."""
        return checked_reward(resolve(self._environment.close(reason)))

    @property
    def name(self) -> str:
        """The environment, prompt, sample and turn, for error messages."""
        one, kind = self.conversation, type(self._environment).__name__
        who = f"{kind} of prompt {one.prompt.text[-80:]!r}, sample {one.sample_idx}"
        return f"Environment {who}, in turn {len(one.turns) + 1}," if one.last else f"The reset of environment {who},"

    def record(self, **facts: Any) -> TurnRecord:
        """Returns the record of the policy's last turn, with these fields of the answer."""
        last = self.conversation.last
        return TurnRecord(text=last.text, num_tokens=len(last.token_ids), **facts)

    def _call_step(self) -> Turn:
        message: Message = {"role": "assistant", "content": self.conversation.last.text}
        return checked_turn(resolve(self._environment.step(message)), self._limits.answer_characters)

    def _next_tokens(self, turn: Turn) -> tuple[list[int], FinishReason | None]:
        """Returns the tokens before the policy's next turn, or the reason why there is no next turn."""
        if turn.done:
            return [], "stop"
        if len(self.conversation.turns) + 1 >= self._limits.turns:
            return [], "max_turns"
        if time.monotonic() > self.ends_at:
            return [], "time"
        token_ids = self._template.answer(turn.messages, self.conversation.last.token_ids[-1])
        return (token_ids, None) if self.conversation.room(len(token_ids)) > 0 else ([], "max_tokens")


class _Overdue(Exception):
    """Stands in for the result of a call that timed out."""


class EnvironmentPool:
    """Runs environments, each in its own thread, and collects their answers. `place` is the conversation's index."""

    def __init__(self, limits: Limits, *, on_failure: Literal["raise", "none"]) -> None:
        self._limits = limits
        self._on_failure = on_failure
        self._has_warned = False
        self._sessions: dict[int, EnvironmentSession] = {}
        self._due: dict[int, float] = {}
        """{place: deadline of the call under way, in `time.monotonic()` seconds}"""
        self._results: queue.SimpleQueue[tuple[int, CallResult]] = queue.SimpleQueue()

    def add(self, place: int, conversation: Conversation, environment: Environment, template: ChatTemplate) -> None:
        """Adds a conversation and starts the reset of its environment."""
        worker = Worker(lambda result: self._results.put((place, result)))
        self._sessions[place] = EnvironmentSession(place, conversation, environment, template, worker, self._limits)
        self._call(place, self._sessions[place].reset)

    def reset_results(self) -> dict[int, ResetResult]:
        """Waits for all resets and returns their results by place.

        All samples of a prompt must see the same messages. If they differ, the first sample's are used, and the others
        count as failed.
        """
        first: dict[int, Prompt] = {}  # {prompt_idx: the prompt of the whole group}
        reset_results: dict[int, ResetResult] = {}
        for place, (prompt, error) in self._collect(wait=True, all=True):
            original = self._sessions[place].conversation.prompt
            if error is None and first.setdefault(original.prompt_idx, prompt).messages != prompt.messages:
                error = ValueError("reset returned other messages than for another sample of the same prompt")
            reset_results[place] = ResetResult(original, None if error is None else self._failed(place, error))
        prompts = {place: first.get(one.prompt.prompt_idx, one.prompt) for place, one in reset_results.items()}
        return {place: result._replace(prompt=prompts[place]) for place, result in reset_results.items()}

    def step_async(self, place: int) -> None:
        """Starts the environment's step on the policy's last turn."""
        self._call(place, self._sessions[place].step)

    def answers(self, *, wait: bool, all: bool) -> list[Answer]:
        """Returns the answers that have arrived, sorted by place.

        `wait`: at least one. `all`: every outstanding one.
        """
        answers = [self._answer(place, result) for place, result in self._collect(wait=wait, all=all)]
        for answer in answers:
            if answer.place in self._sessions and answer.end is not None:
                self._sessions.pop(answer.place).worker.close()
        return answers

    def _answer(self, place: int, result: CallResult) -> Answer:
        if result.error is None:
            return result.value
        session = self._sessions[place]
        if isinstance(result.error, _Overdue) and time.monotonic() >= session.ends_at:
            self.close(place, "time")
            return Answer(place, session.record(), end="time")
        return Answer(place, session.record(), end="env_error", error=self._failed(place, result.error))

    def close(self, place: int, reason: FinishReason) -> None:
        """Starts closing the environment of a finished conversation, without waiting for it."""
        session = self._sessions.pop(place)
        session.worker.call(lambda: session.close(reason))
        session.worker.close()

    def _failed(self, place: int, error: BaseException) -> str:
        """Closes the environment and returns a description of the error.

        Raises ConversationError if on_failure is raise.
        """
        overdue = isinstance(error, _Overdue)
        limit = f"took longer than conversations.call_seconds, {self._limits.call_seconds:g} s"
        reason = limit if overdue else f"{type(error).__name__}: {head_and_tail(str(error), ERROR_CHARACTERS)}"
        session = self._sessions[place]
        self.close(place, "env_error")
        described = f"{session.name} failed: {reason}."
        if self._on_failure == "raise":
            raise ConversationError(
                f"{described} Correct it, or set conversations.on_failure none to continue without a reward for such "
                "samples."
            ) from (None if overdue else error)
        if not self._has_warned:
            logger.warning(f"{described} Such samples get no reward; the metric conversations/env_errors counts them.")
        self._has_warned = True
        return reason

    def _call(self, place: int, function: Callable[[], Any]) -> None:
        session = self._sessions[place]
        self._due[place] = min(time.monotonic() + self._limits.call_seconds, session.ends_at)
        session.worker.call(function)

    def _collect(self, *, wait: bool, all: bool) -> list[tuple[int, CallResult]]:
        """Returns results by place, with `_Overdue` for calls that timed out. Results that arrive later are ignored."""
        found: dict[int, CallResult] = {}
        while self._due:
            blocks = (wait and not found) or all
            left = min(self._due.values()) - time.monotonic() if blocks else 0
            try:
                place, result = self._results.get(timeout=min(max(left, 0), 60))
            except queue.Empty:
                overdue = [place for place, due in self._due.items() if due <= time.monotonic()]
                found |= {place: CallResult(error=_Overdue()) for place in overdue}
                self._due = {place: due for place, due in self._due.items() if place not in overdue}
                if not overdue and not blocks:
                    break
            else:
                if self._due.pop(place, None) is not None:
                    found[place] = result
        return sorted(found.items())
