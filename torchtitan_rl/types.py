"""The values that flow through one step: Prompt -> Completion -> ScoredCompletion -> Episode -> TrainBatch.

Flat on purpose: no inheritance between them, and each later value repeats the few fields of the earlier one that its
readers need. Everything up to `Episode` is small, plain Python, and the same on every rank; only `TrainBatch` holds
tensors.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question to the policy.

    Example: Prompt(prompt_idx=0, text="What is 12 + 34? ...", token_ids=[7, 3, 9], expected_answer="46")
    """

    prompt_idx: int
    """Position in the step's prompts; what completions are grouped by."""
    text: str
    """The prompt as the policy reads it, after any chat template."""
    token_ids: list[int]
    """[Lp]"""
    expected_answer: str
    messages: list[dict[str, str]] | None = None
    """The chat messages that `text` was rendered from; None for a plain-text prompt."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the data set, handed to reward functions by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the generator returns for one sample of one prompt: no reward, no advantage, no group.

    Example: Completion(policy_version=3, prompt_idx=0, sample_idx=1, prompt_token_ids=[7, 3, 9], text="[ANSWER] 46",
    token_ids=[5, 11, 2], token_logprobs=[-0.1, -0.4, -0.01], finish_reason="stop")
    """

    policy_version: int
    """The step after which the weights that sampled it were synced; 0 for the start."""
    prompt_idx: int
    sample_idx: int
    """0 <= sample_idx < n, unique inside its prompt's group."""
    prompt_token_ids: list[int]
    """[Lp]"""
    text: str
    token_ids: list[int]
    """[Lc], with the end-of-sequence token when finish_reason is "stop"."""
    token_logprobs: list[float]
    """[Lc], the sampler's log-probability of each sampled token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(slots=True, kw_only=True)
class Episode:
    """One completion with its reward and advantage: what the trainer packs and the sample tables show."""

    policy_version: int
    prompt_idx: int
    sample_idx: int
    prompt: str
    response: str
    expected_answer: str
    answer: str | None
    prompt_token_ids: list[int]
    """[Lp]"""
    token_ids: list[int]
    """[Lc]"""
    sampler_logprobs: list[float]
    """[Lc]"""
    finish_reason: FinishReason
    reward: float | None
    reward_breakdown: dict[str, float | None]
    extra: dict[str, Any]
    group_size: int
    shaped_reward: float | None = None
    """What the advantage was made from: the reward plus truncation and KL penalties; None where it takes no part."""
    advantage: float = 0.0
    weight: float = 1.0
    """Listwise losses: share of the group's mass (sums to 1 over the group). All others: 1, or 0 in a group whose
    rewards are all equal, which turns off its KL term."""
    in_loss: bool = True
    """False: the completion is shown and counted, but takes no part in the loss (masked or dropped)."""
    reference_logprobs: list[float] | None = None
    """[Lc], the frozen reference's log-probability of each token; None when no reference is used."""
    messages: list[dict[str, str]] | None = None
    """The chat messages of the prompt; None for a plain-text prompt."""
    logprob_diff_mean: float | None = None
    """Mean |trainer - sampler| log-probability over the completion, filled in by the update."""
    logprob_diff_max: float | None = None

    def to_dict(self, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
        """This episode as a plain dict without the fields named in `exclude`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in exclude}


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


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """One packed micro-batch of whole sequences, on the device. T tokens with padding, S sequences.

    Position t holds token t and predicts `labels[t]`, the next token of the same sequence; every other [T] tensor speaks
    of that label.
    """

    token_ids: Tensor
    """[T] int64"""
    labels: Tensor
    """[T] int64, the next token of the same sequence; 0 where there is none."""
    positions: Tensor
    """[T] int64, 0 at the start of each sequence (and of the padding)."""
    loss_mask: Tensor
    """[T] float32, 1 where the label is a completion token that takes part in the loss."""
    sampler_logprobs: Tensor
    """[T] float32, 0 where the label is no completion token."""
    advantages: Tensor
    """[T] float32"""
    sequence_ids: Tensor
    """[T] int64 in [0, S); S on padding."""
    group_ids: Tensor
    """[S] int64, the prompt_idx of each sequence."""
    weights: Tensor
    """[S] float32, `Episode.weight`."""
    episode_indices: list[int]
    """[S], each sequence's place in the step's list of episodes."""
    normalizers: Normalizers
    old_logprobs: Tensor | None = None
    """[T] float32, the policy's own before the first update of this batch; None: the current policy is that policy."""
    reference_logprobs: Tensor | None = None
    """[T] float32, the frozen reference's; None when there is none."""
    sample_ids: list[int] | None = None
    """[S], the sample_idx of each sequence, to name it in errors; None names it by `episode_indices`."""


class Metric(NamedTuple):
    """One number on its way to the recorder, and how to merge it over micro-batches and ranks.

    Example: Metric(value=entropy_sum / n, weight=n) is merged into the token-weighted mean.
    """

    value: float | Tensor
    reduction: str = "mean"
    """A value of `observability.Reduce`."""
    weight: float = 1.0
    """Of a mean: how many units (tokens, sequences) the value stands for."""
