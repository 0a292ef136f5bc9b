"""The types that carry one sample from the prompt to the optimizer.

    Prompt ── Group ──┬─ Completion            written by the policy (and an environment)
                      ├─ ScoredCompletion      a completion and its reward
                      └─ Episode               a scored completion and its advantage
                              └──> TrainBatch  packed tensors, built only from episodes

Each type contains the one before, so every fact is stored once. Everything up to `Episode` is small and, once the
replicas' samples are gathered, equal on every rank. Only `TrainBatch` holds tensors on the device.

The words for one sample:

    rollout   all that is sampled for it, in one trace or several
    trace     one exact token sequence of it
    member    an episode with its prompt, for the packer
    item      one member, or several that share a micro-batch
    segment   a trace in a pack, for attention
    sequence  all segments of a member in a pack, for the loss

A pack, a row and a micro-batch are one thing: one TrainBatch, for one forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchtitan_rl.sampling import SamplingConfig

LARGEST_REWARD = 1e18
"""Sums, squares and weights of larger rewards would overflow."""

FinishReason = Literal[
    "stop", "length", "max_turns", "max_tokens", "max_traces", "time", "broken_call", "env_error"
]
"""Why a completion ended. "stop": the policy or the environment ended it. "length": it reached the longest length.
"max_turns", "max_tokens" (in all), "max_traces" and "time" are limits of a conversation. "broken_call": the agent gave
up after a turn that it could not use; "env_error": the environment failed."""
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32 | np.float64]
"""float32, or float64 where it is said."""
BoolArray = npt.NDArray[np.bool_]
RecordArray = npt.NDArray[np.uint8]
"""[tokens, R], what the sampler recorded at each token."""
NO_RECORD = 255
"""All values of a record's row where the sampler recorded nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One question for the policy.

    Example: Prompt(prompt_idx=0, text="What is 12 + 34? ...", token_ids=[7, 3, 9], expected_answer="46")
    """

    prompt_idx: int
    """Position among the step's prompts; identifies the group."""
    text: str
    """The prompt as the policy reads it, with any chat template applied."""
    token_ids: IntArray
    """[Lp], Lp >= 1, because the last prompt token predicts the first completion token."""
    expected_answer: str
    messages: list[dict[str, Any]] | None = None
    """The chat messages that `text` is rendered from; None for a plain-text prompt."""
    question: str | None = None
    """The data's prompt if it is a text, which reward functions then get. None: they get `messages`, or `text` without any."""
    tools: list[dict[str, Any]] | None = None
    """The row's own tools, as JSON schemas that `text` describes; None: those of the task."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the data set, passed to reward functions by name."""
    task: str = ""
    """The mixture member that the prompt comes from; "" without a mixture."""
    sampling: "SamplingConfig | None" = None
    """Sampling settings of this prompt in training; None: the run's."""
    stream_idx: int = -1
    """Index in the stream of training prompts, for a checkpoint; -1 for a prompt that is not from it."""
    demonstration: "Completion | None" = None
    """The data's completion, learned in place of a sampled one. Its `loss_mask` is True on the tokens to learn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        assert self.token_ids.ndim == 1
        assert self.token_ids.size > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of a conversation: the policy's text and the environment's answer.

    Example: TurnRecord(text="50", num_tokens=3, messages=({"role": "user", "content": "higher"},), reward=-0.1)
    """

    text: str
    num_tokens: int
    """Tokens that the policy sampled in this turn."""
    messages: tuple[dict[str, Any], ...] = ()
    """The environment's answer."""
    reward: float | None = None
    """The environment's reward for this turn. The last turn's includes the one for the end of the conversation."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Values logged by the environment, such as {"tool_calls": 1}."""
    environment_seconds: float = 0.0
    """Duration of the answer."""
    trace: int = 0
    """Index of the trace in which the policy sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One exact token sequence of a rollout.

    A rollout has several traces if its context was rewritten (compaction) or if it has sub-agents. The first goes on
    after the prompt; each other one begins with a context of its own, which is not in the loss.

    Example: Trace(begin=240, context_tokens=61, parent=0, reason="changed message 3", messages=(...,))
    """

    begin: int = 0
    """Place of its first token in the completion's arrays. It ends where the next trace begins."""
    context_tokens: int = 0
    """Tokens of the context; 0 for the first trace, whose context is the prompt."""
    parent: int | None = None
    """The trace from which the context was made; None for the first."""
    reason: str = ""
    """How the context differs from the parent's."""
    messages: tuple[dict[str, Any], ...] = ()
    """The context as messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample for one prompt, without reward or advantage.

    Lists are converted to arrays. The default `loss_mask` is all True.

    Example: Completion(sample_idx=1, policy_version=3, token_ids=[5, 11, 2], sampler_logprobs=[-0.1, -0.4, -0.01],
    text="[ANSWER] 46", finish_reason="stop")
    """

    sample_idx: int
    """0 <= sample_idx < n, unique within the group."""
    policy_version: int
    """The step whose policy sampled it; 0 for the start. If those of several steps did (`token_versions`): the last one."""
    token_ids: IntArray
    """[L], with the end-of-sequence token when finish_reason is "stop". All traces, one after another."""
    sampler_logprobs: FloatArray
    """float32 [L], the sampler's log-probability of each token; 0 for tokens that were not sampled."""
    text: str
    finish_reason: FinishReason
    loss_mask: BoolArray | None = None
    """[L], True for tokens that the policy sampled, or that are to be learned from a demonstration."""
    turns: tuple[TurnRecord, ...] = ()
    """The turns of a conversation in the order of time; empty without an environment."""
    traces: tuple[Trace, ...] = (Trace(),)
    """The token sequences of the rollout."""
    prompt: Prompt | None = None
    """What this sample read, where its agent opened with other messages than those of other samples; None: the group's."""
    error: str | None = None
    """The environment's error, with finish_reason "env_error"."""
    token_versions: IntArray | None = None
    """[L], the policy version that sampled each token of a group in flight; None: all are `policy_version`."""
    sampler_records: RecordArray | None = None
    """[Lp + L, R], what the sampler recorded while it read each token of the prompt and of `token_ids`; None:
    nothing. With `generator.router_replay` the experts that it chose, of all layers. With `SamplingConfig.truncates` the
    tokens that it kept for the next one, a bit each in the order of `np.packbits(..., bitorder="little")`."""

    def __post_init__(self) -> None:
        token_ids = np.asarray(self.token_ids, dtype=np.int32)  # [L]
        mask = np.ones(len(token_ids), dtype=bool)  # [L]
        if self.loss_mask is not None:
            mask = np.asarray(self.loss_mask, dtype=bool)  # [L]
        logprobs = np.asarray(self.sampler_logprobs, dtype=np.float32)  # [L]
        assert token_ids.shape == logprobs.shape == mask.shape == (len(token_ids),)
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "sampler_logprobs", logprobs)
        object.__setattr__(self, "loss_mask", mask)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def spans(self) -> list[slice]:
        """The places of each trace's tokens in the arrays."""
        begins = [*(trace.begin for trace in self.traces), len(self.token_ids)]
        return [slice(begin, end) for begin, end in pairwise(begins)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages after the prompt, of one turn or of a whole conversation, without contexts of later traces."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            messages += turn.messages
        return messages

    @property
    def fresh_mask(self) -> BoolArray:
        """bool [L], True for tokens that the policy sampled with its newest weights."""
        if self.token_versions is None:
            return self.loss_mask
        return self.loss_mask & (self.token_versions == self.policy_version)

    @property
    def oldest_version(self) -> int:
        """The policy version of the first token."""
        if self.token_versions is None or not len(self.token_versions):
            return self.policy_version
        return int(self.token_versions[0])

    @property
    def sampled_logprobs(self) -> FloatArray:
        """[num_sampled] the sampler's log-probabilities of the sampled tokens."""
        return self.sampler_logprobs[self.loss_mask]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredCompletion:
    """A completion and the grader's results.

    Example: ScoredCompletion(completion=c, reward=1.2, reward_breakdown={"correct": 1.0, "format": 0.2})
    """

    completion: Completion
    reward: float | None
    """The weighted sum over reward functions. None if none applied, one with a weight failed, or the environment did: the
    sample is then left out of the baseline."""
    reward_breakdown: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's value, before weighting."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Table cells logged by reward functions with `log_extra`, by column."""
    answer: str | None = None
    """The answer extracted from the text; None if there is none."""
    correct: bool | None = None
    """The task's judgement of the answer; None if there is nothing to judge it by."""
    turn_rewards: tuple[float, ...] = ()
    """In a conversation: each turn's own part of the reward, weighted as in `reward`."""


@dataclass(slots=True, kw_only=True)
class Credit:
    """The algorithm's results for an episode, set by `CreditAssignment.assign`, and columns that others add."""

    left_out: str | None = None
    """Why the episode is not in the loss ("no reward", "truncated", ...); None if it is."""
    shaped_reward: float | None = None
    """The reward with truncation and KL penalties, from which the advantage is computed; None without a reward."""
    advantage: float = 0.0
    """How much better than its group it is, in the unit of the config's `Advantage`."""
    turn_advantages: tuple[float, ...] | None = None
    """With credit by turns: one for each turn. `advantage` is then their mean over tokens."""
    token_advantages: FloatArray | None = None
    """float32 [L] one for each token, set by `episodes.set_token_advantages`; None: those of the episode or its turns.
    `advantage` is then their mean over sampled tokens."""
    columns: dict[str, float] = field(default_factory=dict)
    """Further numbers of the episode, by name, from the advantage or the loss. They are columns of the sample tables."""
    token_columns: dict[str, FloatArray] = field(default_factory=dict)
    """float32 [L] each: further numbers of each token, by name, from a source, the loss or the trainer."""

    @property
    def has_advantage(self) -> bool:
        """Whether any token's advantage is not 0. Turns and tokens may cancel out in the mean."""
        if self.token_advantages is not None:
            return bool(self.token_advantages.any())
        return any(self.turn_advantages or [self.advantage])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobDiff:
    """Differences between the trainer's and the sampler's log-probabilities of an episode's sampled tokens.

    Mean and maximum leave out tokens that older weights sampled; they are 0 if there are no others.
    """

    mean: float
    """Mean absolute difference."""
    max: float
    """Largest absolute difference; NaN if any is."""
    tokens: dict[str, FloatArray] = field(default_factory=dict)
    """float32 [num_sampled] each: `diff` is trainer - sampler, `entropy` is in nats."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """A scored completion, the algorithm's credit for it, and the trainer's measurements."""

    scored: ScoredCompletion
    credit: Credit = field(default_factory=Credit)
    reference_logprobs: FloatArray | None = None
    """float32 [L] the frozen reference's log-probability of each token, set by `trainer.teachers.frozen_models.Reference`."""
    logprob_diff: LogprobDiff | None = None
    """Set by `Trainer.update` on every rank; None for an episode that was not trained on or that no engine sampled."""

    @property
    def completion(self) -> Completion:
        """The sampled completion."""
        return self.scored.completion

    @property
    def reward(self) -> float | None:
        """The grader's reward, before any penalty."""
        return self.scored.reward

    @property
    def in_loss(self) -> bool:
        """Whether the episode is in the loss."""
        return self.credit.left_out is None


Sample = TypeVar("Sample", Completion, ScoredCompletion, Episode)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(Generic[Sample]):
    """One prompt and all its samples, ordered by sample_idx. Its prompt_idx names the group.

    Example: Group(prompt=p, samples=[Completion(sample_idx=0, ...), Completion(sample_idx=1, ...)])
    """

    prompt: Prompt
    samples: list[Sample]


def flat(groups: Sequence[Group[Sample]]) -> list[Sample]:
    """The samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


class Member(NamedTuple):
    """An episode and its prompt. The packer lays out each of its traces; the loss sees all of them as one sequence."""

    prompt: Prompt
    episode: Episode

    @classmethod
    def of(cls, group: Group[Episode], episode: Episode) -> "Member":
        """A group's episode with the prompt that it read."""
        return cls(episode.completion.prompt or group.prompt, episode)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt.token_ids) + len(self.episode.completion.token_ids)

    @property
    def token_ids(self) -> IntArray:
        """[Lp + L], the prompt's and the completion's, all traces one after another."""
        return np.concatenate([self.prompt.token_ids, self.episode.completion.token_ids])

    @property
    def name(self) -> str:
        """The name in messages. Example: "prompt 3, sample 1"."""
        return f"prompt {self.prompt.prompt_idx}, sample {self.episode.completion.sample_idx}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizers:
    """The divisors of losses: counts over one optimizer step, all ranks and micro-batches together."""

    num_tokens: int
    """Loss tokens (N of docs/papers.md)."""
    num_sequences: int
    """Sequences with at least one loss token. All traces of a rollout are one sequence."""
    num_groups: int
    """Groups with at least one sequence that has loss tokens."""
    max_completion_tokens: int
    """The longest completion that the configuration allows."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLayout:
    """The places of P segments in a pack of T tokens, one after another: every trace, and segments of padding.

    A segment is what attention sees as one text. For the loss all traces of a rollout are one sequence (`TrainBatch`).

    A segment may share its first tokens with an earlier one, its root. The pack then holds only its own tokens, whose
    positions begin above 0.

    Example: own tokens [4, 2] and shared {1: (0, 1)} -> positions [0, 1, 2, 3, 1, 2],
    begins [0, 4], lengths [4, 3], roots [0, 0].
    """

    positions: Tensor
    """[T] int64, each token's position in its segment."""
    begins: Tensor
    """[P] int64, the place of each segment's first own token in the pack."""
    lengths: Tensor
    """[P] int64, tokens of each segment, shared ones included."""
    roots: Tensor
    """[P] int64, the place where each segment's root begins; its own place if it shares no tokens."""
    host_lengths: list[int]
    """[P] `lengths` on the host, where they are read without waiting for the device."""
    padding: int = 0
    """Tokens of padding, at the pack's end."""

    @classmethod
    def of(
        cls,
        own: Sequence[int],
        shared: Mapping[int, tuple[int, int]] | None = None,
        *,
        device: str,
        padding: int = 0,
    ) -> "SegmentLayout":
        """The layout of segments with `own` [P] tokens of their own and `shared` {segment: (its root, tokens in it)}.

        A root shares no tokens itself. The last segments are padding, `padding` tokens in all.
        """
        own_tokens = np.asarray(own, dtype=np.int64)  # [P]
        root_of, in_root = np.arange(len(own)), np.zeros_like(own_tokens)  # [P] each
        for segment, (root, count) in (shared or {}).items():
            root_of[segment], in_root[segment] = root, count
        lengths = own_tokens + in_root  # [P]
        begins = np.cumsum(own_tokens) - own_tokens  # [P]
        own_positions = map(np.arange, in_root, lengths)  # [own] each
        return cls(
            positions=torch.from_numpy(np.concatenate([*own_positions])).to(device),
            begins=torch.from_numpy(begins).to(device),
            lengths=torch.from_numpy(lengths).to(device),
            roots=torch.from_numpy(begins[root_of]).to(device),
            host_lengths=lengths.tolist(),
            padding=padding,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One packed micro-batch of whole sequences, on the device: T tokens with padding, S sequences.

    Position t holds token t and predicts `labels[t]`, the next token of the same segment. All other [T] tensors
    refer to that label.
    """

    token_ids: Tensor
    """[T] int64"""
    labels: Tensor
    """[T] int64, the next token of the same segment; 0 at its end and on padding."""
    layout: SegmentLayout
    """The places of the segments, padding included."""
    loss_mask: Tensor
    """[T] float32, 1 where the policy sampled the label and the loss includes it."""
    loss_positions: Tensor
    """[M] int64, where `loss_mask` is 1. On a device, finding them would make the host wait."""
    sampler_logprobs: Tensor
    """[T] float32, 0 where the label is not a completion token."""
    advantages: Tensor
    """[T] float32"""
    sequence_ids: Tensor
    """[T] int64 in [0, S); S on padding."""
    group_ids: Tensor
    """[S] int64, the prompt_idx of each sequence."""
    members: list[Member]
    """[S] the source of each sequence."""
    normalizers: Normalizers
    fresh_mask: Tensor | None = None
    """[T] float32, 1 on the tokens of `loss_mask` that the newest weights sampled; None if all are."""
    pi_old_logprobs: Tensor | None = None
    """[T] float32, log pi_old: the policy's before the training step's first optimizer step. None if there is only one, or if
    no engine sampled: pi_old is then pi."""
    reference_logprobs: Tensor | None = None
    """[T] float32, the frozen reference's; None without a reference."""
    sampler_records: Tensor | None = None
    """[T, R] uint8, what the sampler recorded while it read token t, not its label; NO_RECORD where nothing. None: it
    recorded nothing."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] float32 each, those of `Credit.columns` that the loss asks for."""
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    """[T] float32 each, those of `Credit.token_columns` that the loss asks for."""


class EvaluationPass(NamedTuple):
    """The names of one pass over the held-out prompts."""

    prefix: str
    """Prefix of its metrics and its sample table, such as "evaluation"."""
    split: str
    """The split in its rows: eval_greedy or eval_sampled."""


class Metric(NamedTuple):
    """One value for the recorder, and its merge over micro-batches and ranks.

    Example: Metric(value=entropy_sum / n, weight=n) merges into the token-weighted mean.
    """

    value: float | Tensor
    reduction: str = "mean"
    """A value of `observe.reduce.Reduce`."""
    weight: float = 1.0
    """For a mean: the number of units (tokens, sequences) that the value stands for."""
