"""The environments of one engine's conversations: asked off the engine's thread and held to their limits."""

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
"""Of what an environment raises: some quote all that they were given."""


class ConversationError(TrainingStopped):
    """An environment raised, took too long, or returned what is no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one conversation."""

    turns: int
    seconds: float
    """Of the whole of it; infinite for none."""
    call_seconds: float
    """Of one answer of the environment."""
    answer_characters: int
    """Of one message."""


class EnvironmentSession:
    """One conversation's environment. `open`, `answer` and `close` run in the conversation's own thread."""

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

    def open(self) -> Prompt:
        """The prompt with what the environment says before the policy's first turn."""
        prompt = self.conversation.prompt
        said = checked_messages(resolve(self._environment.reset()), self._limits.answer_characters)
        if not said:
            return prompt
        text, token_ids = self._template.prompt(prompt.messages, said)
        return replace(prompt, messages=[*prompt.messages, *said], text=text, token_ids=token_ids)

    def answer(self) -> Answer:
        """What the environment makes of the policy's last turn."""
        began = time.monotonic()
        cut = self.conversation.last.finish_reason == "length"
        turn = Turn(done=True) if cut else self._step()
        token_ids, end = ([], "max_tokens") if cut else self._go_on(turn)
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
        """The environment's final reward."""
        return checked_reward(resolve(self._environment.close(reason)))

    @property
    def name(self) -> str:
        """For messages: what failed, and where."""
        prompt, turns = self.conversation.prompt, len(self.conversation.turns)
        who = (
            f"{type(self._environment).__name__} of prompt {prompt.text[-80:]!r}, sample {self.conversation.sample_idx}"
        )
        return (
            f"Environment {who}, in turn {turns + 1}," if self.conversation.last else f"The reset of environment {who},"
        )

    def record(self, **facts: Any) -> TurnRecord:
        """The policy's last turn, with these facts of the answer."""
        last = self.conversation.last
        return TurnRecord(text=last.text, num_tokens=len(last.token_ids), **facts)

    def _step(self) -> Turn:
        message: Message = {"role": "assistant", "content": self.conversation.last.text}
        return checked_turn(resolve(self._environment.step(message)), self._limits.answer_characters)

    def _go_on(self, turn: Turn) -> tuple[list[int], FinishReason | None]:
        """What the policy reads next, or why there is no next turn."""
        if turn.done:
            return [], "stop"
        if len(self.conversation.turns) + 1 >= self._limits.turns:
            return [], "max_turns"
        if time.monotonic() > self.ends_at:
            return [], "time"
        token_ids = self._template.answer(turn.messages, self.conversation.last.token_ids[-1])
        return (token_ids, None) if self.conversation.room(len(token_ids)) > 0 else ([], "max_tokens")


class _Overdue(Exception):
    """In place of the result of a call that has not come back in time."""


class EnvironmentPool:
    """Asks environments, each in a thread of its own, and collects what they say."""

    def __init__(self, limits: Limits, *, on_failure: Literal["raise", "none"]) -> None:
        self._limits = limits
        self._on_failure = on_failure
        self._has_warned = False
        self._sessions: dict[int, EnvironmentSession] = {}
        self._due: dict[int, float] = {}
        """{place: when the call that is under way must have come back}"""
        self._results: queue.SimpleQueue[tuple[int, CallResult]] = queue.SimpleQueue()

    def add(self, place: int, conversation: Conversation, environment: Environment, template: ChatTemplate) -> None:
        """Take in a conversation and reset its environment."""
        worker = Worker(lambda result: self._results.put((place, result)))
        self._sessions[place] = EnvironmentSession(place, conversation, environment, template, worker, self._limits)
        self._call(place, self._sessions[place].open)

    def reset_results(self) -> dict[int, ResetResult]:
        """What came of every reset. Samples of one prompt share it: where their environments say different things, the first
        one's word counts and the others have failed."""
        first: dict[int, Prompt] = {}  # {prompt_idx: the prompt of the whole group}
        reset_results: dict[int, ResetResult] = {}
        for place, (prompt, error) in self._collect(wait=True, all=True):
            asked = self._sessions[place].conversation.prompt
            if error is None and first.setdefault(asked.prompt_idx, prompt).messages != prompt.messages:
                error = ValueError("reset said something else than for another sample of the prompt, which they share")
            reset_results[place] = ResetResult(asked, None if error is None else self._failed(place, error))
        prompts = {place: first.get(one.prompt.prompt_idx, one.prompt) for place, one in reset_results.items()}
        return {place: result._replace(prompt=prompts[place]) for place, result in reset_results.items()}

    def step_async(self, place: int) -> None:
        """Let the environment answer the policy's last turn."""
        self._call(place, self._sessions[place].answer)

    def answers(self, *, wait: bool, all: bool) -> list[Answer]:
        """What has been answered since, by place; with `wait` one at least, with `all` every one that is outstanding."""
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
        """Close the environment of a conversation that is over, without waiting for it."""
        session = self._sessions.pop(place)
        session.worker.call(lambda: session.close(reason))
        session.worker.close()

    def _failed(self, place: int, error: BaseException) -> str:
        """What went wrong, for people. Raises ConversationError where that ends the run."""
        overdue = isinstance(error, _Overdue)
        limit = f"took longer than conversations.call_seconds, {self._limits.call_seconds:g} s"
        told = limit if overdue else f"{type(error).__name__}: {head_and_tail(str(error), ERROR_CHARACTERS)}"
        session = self._sessions[place]
        self.close(place, "env_error")
        described = f"{session.name} failed: {told}."
        if self._on_failure == "raise":
            raise ConversationError(
                f"{described} Correct it, or set conversations.on_failure none to go on without a reward for such samples."
            ) from (None if overdue else error)
        if not self._has_warned:
            logger.warning(f"{described} Such samples get no reward; the metric conversations/env_errors counts them.")
        self._has_warned = True
        return told

    def _call(self, place: int, function: Callable[[], Any]) -> None:
        session = self._sessions[place]
        self._due[place] = min(time.monotonic() + self._limits.call_seconds, session.ends_at)
        session.worker.call(function)

    def _collect(self, *, wait: bool, all: bool) -> list[tuple[int, CallResult]]:
        """What came back, and `_Overdue` for what did not in time; what comes back later is not heard."""
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
