"""The state of one unfinished sample: the policy's turns and the environment's answers so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchtitan_rl.core.types import Completion, FinishReason, Prompt, TurnRecord

if TYPE_CHECKING:
    from torchtitan_rl.core.generator import SamplingConfig


class Sampled(NamedTuple):
    """One turn of the policy, as the engine sampled it."""

    conversation_idx: int
    """Index of its conversation in the call."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: FinishReason | None
    """stop or length; None for a turn that is not at its end"""


class Answer(NamedTuple):
    """An environment's answer to one turn or its first messages, identical on every rank of the engine."""

    conversation_idx: int
    """Index of its conversation in the call."""
    turn: TurnRecord | None = None
    """The answered turn, with its reward if it has one; None for the reset."""
    token_ids: Sequence[int] = ()
    """Rendered tokens that the policy reads next."""
    end: FinishReason | None = None
    """Why the conversation is over; None if it continues."""
    error: str | None = None
    """The environment's error, if `end` is "env_error"."""
    prompt: Prompt | None = None
    """Of a reset: the prompt with the environment's first messages; None if the conversation has no environment."""


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """Tokens are only appended: the policy's as they were sampled, the environment's as they were rendered."""

    prompt: Prompt
    sample_idx: int
    sampling: "SamplingConfig"
    """Its max_tokens limits the sampled tokens of all turns together."""
    most_in_turn: int
    """Maximum number of sampled tokens in one turn."""
    most_tokens: int
    """Maximum number of tokens in the prompt and all turns together."""
    seed: int = 0
    """For its environment. It differs from sample to sample and from step to step."""
    in_turns: bool = False
    """Whether an environment answers. Without one, the first turn is the last."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The policy version of the tokens from earlier steps. The other tokens are of this step."""
    num_sampled: int = 0
    last: Sampled | None = None
    """The policy's most recent turn."""
    turns: list[TurnRecord] = field(default_factory=list)
    """The turns that have been answered."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def context(self) -> list[int]:
        """All tokens before the next turn."""
        return [*self.prompt.token_ids.tolist(), *self.token_ids]

    def room(self, more: int = 0) -> int:
        """Returns the most tokens that the next turn may have after `more` tokens of an answer; 0 or less means
        none."""
        used = len(self.prompt.token_ids) + len(self.token_ids) + more
        return min(
            self.sampling.max_tokens - self.num_sampled, self.most_in_turn, self.most_tokens - used
        )

    def append_turn(self, sampled: Sampled) -> None:
        """Append a turn of the policy as it was sampled, or as far as it was: it then has no finish_reason."""
        self._append(sampled.token_ids, sampled.logprobs, is_sampled=True)
        self.num_sampled += len(sampled.token_ids)
        self.last = sampled
        if not self.in_turns:
            self.finish_reason = sampled.finish_reason

    def append_answer(self, answer: Answer) -> None:
        """Append the environment's answer to the last turn. The answer to the reset replaces the prompt."""
        self._append(answer.token_ids, [0.0] * len(answer.token_ids), is_sampled=False)
        if answer.turn is not None:
            self.turns.append(answer.turn)
        elif answer.prompt is not None:
            self.prompt, self.in_turns = answer.prompt, True
        self.finish_reason, self.error = answer.end, answer.error

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [is_sampled] * len(token_ids)

    def all_versions(self, newest: int) -> list[int]:
        """Returns the policy version of every token, if the `newest` sampled those of this step."""
        return self.versions + [newest] * (len(self.token_ids) - len(self.versions))

    def completion(self, policy_version: int) -> Completion:
        """Returns the whole conversation as a completion. Call it when the conversation is over."""
        said = (
            [turn.text for turn in self.turns]
            if self.in_turns
            else [self.last.text if self.last else ""]
        )
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
            token_versions=np.array(self.all_versions(policy_version), dtype=np.int32)
            if self.versions
            else None,
        )
