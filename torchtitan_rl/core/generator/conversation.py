"""One sample on its way: what the policy and its environment have said so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchtitan_rl.core.types import Completion, FinishReason, Prompt, TurnRecord

if TYPE_CHECKING:
    from torchtitan_rl.core.generator import SamplingConfig


class Sampled(NamedTuple):
    """One turn of the policy, as the engine sampled it."""

    place: int
    """Of its conversation, in the order they were begun."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: FinishReason
    """stop or length"""


class Answer(NamedTuple):
    """How a conversation goes on after a turn of the policy: the same on every rank of its engine."""

    place: int
    turn: TurnRecord | None = None
    """The turn, with what the environment made of it; None where there was none yet."""
    token_ids: Sequence[int] = ()
    """What the policy reads next."""
    end: FinishReason | None = None
    """Why it is over; None: it goes on."""
    error: str | None = None
    """Of the environment, with end "env_error"."""


class ResetResult(NamedTuple):
    """The prompt with the environment's first messages, or why its reset failed."""

    prompt: Prompt
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """Tokens are only ever appended: the policy's as they were sampled, an environment's as they were rendered."""

    prompt: Prompt
    sample_idx: int
    sampling: "SamplingConfig"
    """Whose max_tokens is of all turns together."""
    most_in_turn: int
    """Tokens of one turn."""
    most_tokens: int
    """Of the prompt and all that follows."""
    in_turns: bool = False
    """Whether an environment answers; else the first turn is the last."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    num_sampled: int = 0
    last: Sampled | None = None
    """The policy's last turn."""
    turns: list[TurnRecord] = field(default_factory=list)
    """Those that have been answered."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def context(self) -> list[int]:
        """What the next turn is sampled after."""
        return [*self.prompt.token_ids.tolist(), *self.token_ids]

    def room(self, more: int = 0) -> int:
        """Tokens that the next turn may have after `more` of an answer; 0 or less: there is none."""
        used = len(self.prompt.token_ids) + len(self.token_ids) + more
        return min(self.sampling.max_tokens - self.num_sampled, self.most_in_turn, self.most_tokens - used)

    def append_turn(self, sampled: Sampled) -> None:
        """Appends a turn of the policy as it was sampled."""
        self._append(sampled.token_ids, sampled.logprobs, is_sampled=True)
        self.num_sampled += len(sampled.token_ids)
        self.last = sampled
        if not self.in_turns:
            self.finish_reason = sampled.finish_reason

    def append_answer(self, answer: Answer) -> None:
        """Appends the environment's answer to the turn."""
        self._append(answer.token_ids, [0.0] * len(answer.token_ids), is_sampled=False)
        if answer.turn is not None:
            self.turns.append(answer.turn)
        self.finish_reason, self.error = answer.end, answer.error

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [is_sampled] * len(token_ids)

    def completion(self, policy_version: int) -> Completion:
        """All of it, when it is over."""
        said = [turn.text for turn in self.turns] if self.in_turns else [self.last.text if self.last else ""]
        return Completion(
            sample_idx=self.sample_idx,
            policy_version=policy_version,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            loss_mask=self.loss_mask,
            text="\n".join(said),
            finish_reason=self.finish_reason,
            turns=tuple(self.turns),
            error=self.error,
        )
