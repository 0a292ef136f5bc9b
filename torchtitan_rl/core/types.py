"""The spine: one sample on its way from the prompt to the optimizer, and the group it belongs to.

    Prompt ── Group ──┬─ Completion            what the policy (and an environment) wrote
                      ├─ ScoredCompletion      ... and what the grader made of it
                      └─ Episode               ... and what the objective made of that
                              └──> TrainBatch  packed tensors, built from episodes and nothing else

Each value holds the one before, so every fact has one home. Generator, grader, gather, algorithm, packer and tables speak in
groups; `prompt_idx` is an identity, never something to sort or pair by on the way. Everything up to `Episode` is small and the
same on every rank; only `TrainBatch` holds tensors on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchtitan_rl.core.generator import SamplingConfig

FinishReason = Literal["stop", "length", "max_turns", "max_tokens", "time", "env_error"]
"""Why a completion ended: by itself or by its environment; cut at its longest length; or a conversation's limits (turns,
tokens in all, seconds) and its environment's failure."""
IntArray = np.ndarray
"""int32"""
FloatArray = np.ndarray
"""float32"""
BoolArray = np.ndarray
"""bool"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One question to the policy.

    Example: Prompt(prompt_idx=0, text="What is 12 + 34? ...", token_ids=[7, 3, 9], expected_answer="46")
    """

    prompt_idx: int
    """Position in the step's prompts; what its group goes by."""
    text: str
    """The prompt as the policy reads it, after any chat template."""
    token_ids: IntArray
    """int32 [Lp], at least one: the first completion token is predicted from the last of these."""
    expected_answer: str
    messages: list[dict[str, str]] | None = None
    """The chat messages that `text` was rendered from; None for a plain-text prompt."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the data set, handed to reward functions by name."""
    task: str = ""
    """The member of a mixture that asks; "" for a run's only task."""
    sampling: "SamplingConfig | None" = None
    """How its completions are sampled in training; None: as the run's configuration says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(
                f"prompt {self.prompt_idx}: token_ids has shape {self.token_ids.shape}; expected [Lp], Lp >= 1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of a conversation: what the policy said, and what its environment made of it.

    Example: TurnRecord(text="50", num_tokens=3, messages=({"role": "user", "content": "higher"},), reward=-0.1)
    """

    text: str
    num_tokens: int
    """That the policy sampled in this turn."""
    messages: tuple[dict[str, Any], ...] = ()
    """What the environment answered."""
    reward: float | None = None
    """The environment's for this turn; the last one's includes what it gave at the end of the conversation."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What the environment logged, such as {"tool_calls": 1}."""
    environment_seconds: float = 0.0
    """That the answer took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample of one prompt: no reward, no advantage, no group.

    Lists are accepted and become arrays; without a `loss_mask` the policy sampled every token.

    Example: Completion(sample_idx=1, policy_version=3, token_ids=[5, 11, 2], logprobs=[-0.1, -0.4, -0.01],
    text="[ANSWER] 46", finish_reason="stop")
    """

    sample_idx: int
    """0 <= sample_idx < n, unique inside its group."""
    policy_version: int
    """The step after which the weights that sampled it were synced; 0 for the start."""
    token_ids: IntArray
    """int32 [L], with the end-of-sequence token when finish_reason is "stop"."""
    logprobs: FloatArray
    """float32 [L], the sampler's log-probability of each token; 0 where it did not sample."""
    text: str
    finish_reason: FinishReason
    loss_mask: BoolArray | None = None
    """bool [L], True where the policy sampled the token, False on what an environment or a tool wrote."""
    turns: tuple[TurnRecord, ...] = ()
    """Of a conversation with an environment, in order; none otherwise."""
    error: str | None = None
    """What went wrong in the environment, with finish_reason "env_error"."""

    def __post_init__(self) -> None:
        token_ids = np.asarray(self.token_ids, dtype=np.int32)  # [L]
        mask = np.ones(len(token_ids), dtype=bool) if self.loss_mask is None else np.asarray(self.loss_mask, dtype=bool)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)  # [L]
        if not token_ids.shape == logprobs.shape == mask.shape == (len(token_ids),):
            raise ValueError(
                f"sample {self.sample_idx}: {token_ids.shape} token_ids, {logprobs.shape} logprobs and {mask.shape} "
                "loss_mask; expected one of each for every token."
            )
        for name, array in (("token_ids", token_ids), ("logprobs", logprobs), ("loss_mask", mask)):
            object.__setattr__(self, name, array)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that was said after the prompt: of one turn, or of a whole conversation."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        return [said for turn in self.turns for said in ({"role": "assistant", "content": turn.text}, *turn.messages)]

    @property
    def sampled_ids(self) -> IntArray:
        """[num_sampled] the ids of those tokens."""
        return self.token_ids[self.loss_mask]

    @property
    def sampled_logprobs(self) -> FloatArray:
        """[num_sampled] the sampler's log-probabilities of those tokens."""
        return self.logprobs[self.loss_mask]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredCompletion:
    """A completion and what the grader made of it.

    Example: ScoredCompletion(completion=c, reward=1.2, reward_breakdown={"correct": 1.0, "format": 0.2})
    """

    completion: Completion
    reward: float | None
    """The weighted sum over reward functions; None when none applied (then it takes no part in the baseline)."""
    reward_breakdown: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's value, before weighting."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What reward functions logged with `log_extra`: one cell for each column."""
    answer: str | None = None
    """The answer extracted from the text; None when none could be."""
    correct: bool | None = None
    """The task's own judgement of the answer; None where there is nothing to judge by."""
    turn_rewards: tuple[float, ...] = ()
    """Of a conversation: the part of the reward that each turn earned by itself, as it counts in the sum."""


@dataclass(slots=True, kw_only=True)
class Credit:
    """What the algorithm decided about an episode, filled in by `Algorithm.assign_credit`."""

    left_out: str | None = None
    """Why the episode takes no part in the loss ("no reward", "truncated", ...); None: it does."""
    shaped_reward: float | None = None
    """The reward plus truncation and KL penalties, from which the advantage is made; None for an episode without one."""
    advantage: float = 0.0
    turn_advantages: tuple[float, ...] | None = None
    """One for each turn, where the objective gives credit by turns; `advantage` is then their mean over tokens."""
    mass: float | None = None
    """Listwise losses: the episode's share of the group's mass, which sums to 1; None with any other loss."""
    q_mass: float | None = None
    """Listwise losses: the episode's share of the distribution that the rewards alone ask for."""
    anchored: bool = True
    """Whether the KL term applies. False in a group whose rewards are all equal: the reference alone must not move it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobDiff:
    """The differences between the trainer's and the sampler's log-probabilities of an episode's sampled tokens."""

    mean: float
    """Mean absolute difference."""
    max: float
    """Largest absolute difference; NaN if any is."""
    signed: FloatArray | None = None
    """float32 [num_sampled] trainer - sampler, on the rank that trained the episode; None on the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """A scored completion, the algorithm's credit for it, and what the trainer measured."""

    scored: ScoredCompletion
    credit: Credit = field(default_factory=Credit)
    reference_logprobs: FloatArray | None = None
    """float32 [L] the frozen reference's log-probability of each token, set by `Trainer.score_reference`; None without one."""
    logprob_diff: LogprobDiff | None = None
    """Set by `Trainer.update`, on every rank; None for an episode that was not trained on."""

    @property
    def completion(self) -> Completion:
        """What was sampled."""
        return self.scored.completion

    @property
    def reward(self) -> float | None:
        """The grader's, before any penalty."""
        return self.scored.reward

    @property
    def token_advantages(self) -> FloatArray:
        """[L] the advantage of each sampled token; 0 on tokens that the policy did not sample."""
        mask = self.completion.loss_mask  # [L]
        if self.credit.turn_advantages is None:
            return self.credit.advantage * mask
        found = np.zeros(len(mask))
        found[mask] = np.repeat(self.credit.turn_advantages, [turn.num_tokens for turn in self.completion.turns])
        return found

    @property
    def in_loss(self) -> bool:
        """Whether it takes part in the loss."""
        return self.credit.left_out is None


Sample = TypeVar("Sample", Completion, ScoredCompletion, Episode)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(Generic[Sample]):
    """One prompt and all that was sampled for it, by sample_idx.

    Example: Group(prompt=p, samples=[Completion(sample_idx=0, ...), Completion(sample_idx=1, ...)])
    """

    prompt: Prompt
    samples: list[Sample]


def flat(groups: Sequence[Group[Sample]]) -> list[Sample]:
    """The samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


class Member(NamedTuple):
    """An episode and the prompt that it completes: what the packer lays out as one sequence."""

    prompt: Prompt
    episode: Episode

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt.token_ids) + len(self.episode.completion.token_ids)

    @property
    def name(self) -> str:
        """For messages. Example: "prompt 3, sample 1"."""
        return f"prompt {self.prompt.prompt_idx}, sample {self.episode.completion.sample_idx}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizers:
    """Counts over one optimizer update, every rank and micro-batch together: what losses are divided by."""

    num_tokens: int
    """Loss tokens (N of docs/algorithms.md)."""
    num_sequences: int
    """Sequences with at least one loss token."""
    num_groups: int
    """Groups with at least one such sequence."""
    max_completion_tokens: int
    """The configured longest completion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceLayout:
    """Where S sequences lie in a pack of T tokens, one behind another; padding is sequences too.

    A sequence may leave its first tokens to one before it, its root, which has the same ones. Its own tokens in the pack then
    begin at a position above 0.

    Example: own tokens [4, 2] of which the second leaves 1 to the first -> positions [0, 1, 2, 3, 1, 2], begins [0, 4],
    lengths [4, 3], roots [0, 0], longest 4.
    """

    positions: Tensor
    """[T] int64 each token's position in its sequence"""
    begins: Tensor
    """[S] int64 the place of each sequence's first own token"""
    lengths: Tensor
    """[S] int64 tokens of each sequence, with those that it leaves to its root"""
    roots: Tensor
    """[S] int64 the place where each sequence's root begins; its own place where it leaves nothing to another"""
    longest: int
    """Tokens of the longest sequence, known without asking the device."""

    @classmethod
    def of(cls, own: Sequence[int], shared: Sequence[int] | None = None, *, device: str) -> "SequenceLayout":
        """The layout of sequences with these numbers of own tokens, [S], and of tokens left to a root, [S] (default: none).

        A sequence that leaves tokens has as its root the nearest one before it that leaves none.
        """
        own_tokens = np.asarray(own, dtype=np.int64)  # [S]
        left = np.zeros_like(own_tokens) if shared is None else np.asarray(shared, dtype=np.int64)  # [S]
        begins = np.cumsum(own_tokens) - own_tokens  # [S]
        roots = np.maximum.accumulate(np.where(left == 0, begins, 0))  # [S]
        positions = [np.arange(n, n + length) for n, length in zip(left, own_tokens, strict=True)]
        on_device = (
            torch.from_numpy(a).to(device) for a in (np.concatenate(positions), begins, own_tokens + left, roots)
        )
        return cls(
            **dict(zip(("positions", "begins", "lengths", "roots"), on_device)), longest=int((own_tokens + left).max())
        )


@dataclass(slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One packed micro-batch of whole sequences, on the device. T tokens with padding, S sequences.

    Position t holds token t and predicts `labels[t]`, the next token of the same sequence; every other [T] tensor speaks
    of that label.
    """

    token_ids: Tensor
    """[T] int64"""
    labels: Tensor
    """[T] int64, the next token of the same sequence; 0 where there is none."""
    layout: SequenceLayout
    """Where the sequences are, those of the padding included."""
    loss_mask: Tensor
    """[T] float32, 1 where the label is a token that the policy sampled and the loss takes in."""
    sampler_logprobs: Tensor
    """[T] float32, 0 where the label is no completion token."""
    advantages: Tensor
    """[T] float32"""
    sequence_ids: Tensor
    """[T] int64 in [0, S); S on padding."""
    group_ids: Tensor
    """[S] int64, the prompt_idx of each sequence."""
    mass: Tensor
    """[S] float32, `Episode.mass`; 0 where there is none."""
    anchored: Tensor
    """[S] float32, 1 where the KL term applies."""
    members: list[Member]
    """[S], what each sequence was built from."""
    normalizers: Normalizers
    old_logprobs: Tensor | None = None
    """[T] float32, the policy's own before the first update of this batch; None: the current policy is that policy."""
    reference_logprobs: Tensor | None = None
    """[T] float32, the frozen reference's; None when there is none."""


class Metric(NamedTuple):
    """One number on its way to the recorder, and how to merge it over micro-batches and ranks.

    Example: Metric(value=entropy_sum / n, weight=n) is merged into the token-weighted mean.
    """

    value: float | Tensor
    reduction: str = "mean"
    """A value of `observability.Reduce`."""
    weight: float = 1.0
    """Of a mean: how many units (tokens, sequences) the value stands for."""
