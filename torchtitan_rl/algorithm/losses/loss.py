"""The loss of packed tokens: what it reads, what every loss declares, the clip loss, and how token losses become one number."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode, Group, Metric, Normalizers, TrainBatch

TEACHER_TOKEN = "teacher_token"
"""The token column of episodes with the teacher's most likely token, where it is known."""


LOG_RATIO_LIMIT = 20.0
"""Clamp on |log ratio|. e^20 is 4.9e8, whose square fits float32, so one token cannot make the gradient norm infinite.
Clamped tokens get no gradient through the ratio and are counted."""


class Source(Protocol):
    """A frozen model that scores the step's episodes before they get credit: `trainer.teachers.frozen_models.Reference`, or a
    teacher."""

    name: str
    """What its time is reported as."""

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set its log-probabilities of every episode's tokens: `reference_logprobs`, or one of
        `Credit.token_columns`. Collective."""


class Sequences:
    """Sums and means over each sequence of a packed row.

    Example: ids = [0, 0, 1, 2] with S = 2 holds two sequences and one padding token.
    """

    def __init__(self, ids: Tensor, mask: Tensor, num_sequences: int) -> None:
        """`ids`: [T] int64 in [0, S], S on padding. `mask`: [T], 1 on loss tokens. `num_sequences`: S."""
        self.ids = ids
        self.mask = mask
        self.num = num_sequences
        self.num_loss_tokens = self.sum(torch.ones_like(mask))  # [S]
        self.present = self.num_loss_tokens > 0  # [S] in the loss

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [S]: sums over each sequence's loss tokens."""
        with_padding = values.new_zeros(self.num + 1)  # [S + 1], the last for padding
        values = values * self.mask.to(values.dtype)  # [T]
        return with_padding.index_add(0, self.ids, values)[: self.num]

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [S]: means over each sequence's loss tokens; 0 for a sequence without loss tokens."""
        lengths = self.num_loss_tokens.clamp(min=1).to(values.dtype)  # [S]
        return self.sum(values) / lengths

    def expand(self, values: Tensor) -> Tensor:
        """[S] -> [T]: each sequence's value on its tokens, 0 on padding."""
        with_padding = torch.cat([values, values.new_zeros(1)])  # [S + 1]
        return with_padding[self.ids]  # [T]


@dataclass(slots=True, kw_only=True)
class LossInputs:
    """One packed micro-batch of T tokens and S sequences. Outside `mask` every [T] tensor is 0, but `correction` may be
    anything."""

    logprobs: Tensor
    """[T] log pi of each label, with gradient."""
    old_logprobs: Tensor
    """[T] the log of the ratio's denominator, no gradient: log pi_old, or with `algorithm.old_logprobs` "sampler" log mu.
    pi_old is pi if the training step has one optimizer step."""
    advantages: Tensor
    """[T]"""
    mask: Tensor
    """[T] 1.0 on loss tokens."""
    entropy: Tensor
    """[T] H(pi) in nats, with gradient if `entropy_coef` > 0 or the loss needs it."""
    sampler_logprobs: Tensor
    """[T] log mu, no gradient; log pi_old for a loss with `from_engine` False."""
    reference_logprobs: Tensor | None
    """[T] log pi_ref, no gradient; None without a reference (`Loss.needs_reference`)."""
    correction: Tensor
    """[T] the weight of the mismatch correction, no gradient; 1 without a correction."""
    sequences: Sequences
    group_ids: Tensor
    """[S] int64"""
    normalizers: Normalizers
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] each, by name: `Loss.sequence_columns`."""
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, by name: `Loss.token_columns`."""

    @property
    def log_ratio(self) -> Tensor:
        """[T] logprobs - old_logprobs. Where pi_old is pi it is exactly 0, still with the gradient of log pi."""
        return self.logprobs - self.old_logprobs

    @property
    def positions(self) -> Tensor:
        """[T] int64, how many loss tokens of its sequence come before each loss token. Outside `mask` it means
        nothing."""
        before = self.mask.long().cumsum(0) - self.mask.long()  # [T] in the whole row
        lengths = self.sequences.num_loss_tokens.long()  # [S]
        return before - self.sequences.expand(lengths.cumsum(0) - lengths)  # [T]

    @property
    def same_group(self) -> Tensor:
        """[S, S] bool: true if two sequences answer the same prompt."""
        return self.group_ids[:, None] == self.group_ids[None, :]


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the exponent clamped to +-LOG_RATIO_LIMIT. Any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_values(field: str, part: OwnConfig, values: Tensor, shape: torch.Size) -> None:
    """Raise UserError unless a part returned a number for each token [T], or each sequence [S].

    PyTorch would broadcast another shape, and multiply by a mask, in silence.

    Args:
        field: the part's field. Example: "algorithm.loss"
    """
    if isinstance(values, Tensor) and values.shape == shape and values.is_floating_point():
        return
    returned = type(values).__name__
    if isinstance(values, Tensor):
        returned = f"a {values.dtype} tensor of shape {list(values.shape)}"
    raise UserError(
        f"{field}: {type(part).__qualname__} returned {returned}: expected floats of shape {list(shape)}, one for each token "
        "of the micro-batch, or each sequence for a loss of groups. Leave sums and means to algorithm.aggregation."
    )


class Aggregation(OwnConfig, ABC):
    """Makes one number of token losses. It divides by counts of the whole optimizer step, so that the shares of micro-batches
    and data-parallel ranks add up."""

    @abstractmethod
    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """[T] -> 0-d. Tokens outside the mask are ignored. Without loss tokens it is 0, not NaN."""


class TokenMean(Aggregation):
    """L = sum_t m_t l_t / N, N the loss tokens of the whole optimizer step. DAPO, arXiv 2503.14476."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return (token_losses * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)


class Loss(OwnConfig, ABC):
    """The base of `algorithm.loss`, and the seam for objectives of every kind. In the order of a step a loss says

    1. what it learns from: `uses_rewards`, `uses_advantages`, `from_engine`, `needs_reference`, `needs_teacher`,
       `divergence_beta`;
    2. what it adds to the credit of the episodes: `assign_credit`;
    3. what it needs of the packed batch: `sequence_columns`, `token_columns`, `whole_groups`;
    4. the loss: `terms`; and after the update its controllers: `after_update`.

    The default of every field suits a `TokenLoss`, which compares tokens with advantages. A loss over groups sets its own
    credit and asks for whole groups (losses/maxent). Demonstrations have `uses_rewards` and `from_engine` False, and
    their loss is -log pi. A teacher's log-probabilities, set by a source before the credit, are one of the
    `token_columns`; the exact divergence from it is the column "divergence", which the trainer sets.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        def check_objective(self, objective: OwnConfig.Config) -> None:
            """Raise UserError if a setting of the objective, an `Algorithm.Config`, has no effect with this loss."""

    uses_rewards: bool = True
    """Whether it learns from rewards. If not, an episode without a reward is in the loss, and a group may have one
    sample."""
    uses_advantages: bool = True
    """Whether `algorithm.advantage` sets the advantages. If not, it is not called."""
    from_engine: bool = True
    """Whether the engine has sampled the tokens. If not, there are no log mu and no ratio: pi_old is pi, and trainer
    and sampler are not compared."""
    needs_reference: bool = False
    """Whether the loss reads the frozen reference's log-probabilities."""
    needs_teacher: bool = False
    """Whether it learns from a teacher: its log-probabilities, a token column of the credit, or the divergence."""
    divergence_beta: float | None = None
    """The beta of the exact divergence from the teacher that the loss reads from `LossInputs.token_columns`, as
    `models.divergence.chunked_divergence` has it. None: it reads none."""
    whole_groups: bool = False
    """Whether all sequences of a group must be in one micro-batch."""
    sequence_columns: tuple[str, ...] = ()
    """Names in `Credit.columns` that it reads from `LossInputs.columns`, [S] each."""
    token_columns: tuple[str, ...] = ()
    """Names in `Credit.token_columns` that it reads from `LossInputs.token_columns`, [T] each."""
    source_columns: tuple[str, ...] = ()
    """Names in `Credit.token_columns` that a source sets before `assign_credit`: log-probabilities, [L] each."""
    needs_entropy_gradient: bool = False
    """Whether it differentiates `LossInputs.entropy`."""
    controller_inputs: tuple[str, ...] = ()
    """Keys of the step's merged metrics that `after_update` reads."""

    @property
    def ratio_loss(self) -> "TokenLoss | None":
        """The loss whose ratio and clipping are reported; None if there is none."""
        return None

    def sources(self, trainer: Any) -> list[Source]:
        """Returns each source that it asks for, besides the reference and a teacher. `trainer`: a Trainer."""
        return []

    def validate_group_size(self, n: int) -> None:
        """Raise UserError if the loss does not work with groups of n completions."""

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        """Add to the credit of the step's episodes, which have shaped rewards and, with `uses_advantages`,
        advantages."""

    def zero_gradient(self, episode: Episode) -> bool:
        """Whether the loss has zero gradient for this credited episode, so that it needs no backward pass."""
        return False

    def check_batch(self, batch: TrainBatch) -> None:
        """Raise ValueError if the micro-batch is not packed as the loss asks."""

    @abstractmethod
    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        """This micro-batch's share of the loss, as "policy", and those of its parts to report; 0-d each."""

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics of a micro-batch that are specific to this loss: (mean, weight), 0-d each. Called without
        gradient."""
        return {}

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Metrics of the step's groups that are specific to this loss."""
        return {}

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Update the controllers, given the merged values of `controller_inputs`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The controllers' state; empty without controllers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class TokenLoss(Loss):
    """A loss for each token, to be minimised. Most subclasses write only `__call__`."""

    uses_ratio: ClassVar[bool] = True
    """Whether the loss uses the ratio; otherwise nothing is clamped or clipped."""
    zero_without_advantage: ClassVar[bool] = False
    """Whether a token without an advantage has zero gradient. A subclass says it again: it may add a term that has one."""

    @property
    def ratio_loss(self) -> "TokenLoss | None":
        return self if self.from_engine else None

    def zero_gradient(self, episode: Episode) -> bool:
        own = vars(type(self)).get("zero_without_advantage", False)  # not inherited
        return own and not episode.credit.has_advantage

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[T] the loss of each token; values outside `inputs.mask` are ignored."""

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        losses = self(inputs)  # [T]
        check_values("algorithm.loss", self, losses, inputs.mask.shape)
        return {"policy": aggregation(losses * inputs.correction, inputs)}

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the log of the ratio that the loss uses, before clamping; by default log rho_t = log pi - log pi_old."""
        return inputs.log_ratio

    def ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the ratio that the loss uses, with gradient."""
        return safe_exp(self.log_ratio(inputs))  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] bool tensors by side ("low", "high", ...), true where clipping changes the gradient. Empty: no
        clipping."""
        return {}


class Clip(TokenLoss):
    """l_t = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with dual_clip c, for A < 0, min(l_t, -c A).

    PPO arXiv 1707.06347, GRPO arXiv 2402.03300, DAPO (eps_high 0.28) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        eps_low: float = number(0.2, above=0, most=1)
        """Ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(0.2, above=0, most=10, remedy="Use 0.28, DAPO's value.")
        """Ratios above 1 + eps_high get no gradient where A > 0; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = number(None, above=1, remedy="Use 3, the paper's value.")
        """Bound on the loss where A < 0, as a multiple of |A|; None for no bound."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        advantages = inputs.advantages  # [T]
        ratio = self.ratio(inputs)  # [T]
        bounded = ratio.clamp(1 - self.config.eps_low, 1 + self.config.eps_high)  # [T]
        losses = -torch.minimum(ratio * advantages, bounded * advantages)  # [T]
        if self.config.dual_clip is None:
            return losses
        ceiling = torch.minimum(losses, -self.config.dual_clip * advantages)  # [T]
        return torch.where(advantages < 0, ceiling, losses)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low", "high", and with dual_clip "dual"."""
        negative = inputs.advantages < 0  # [T]
        sides = {
            "low": (ratio < 1 - self.config.eps_low) & negative,  # [T]
            "high": (ratio > 1 + self.config.eps_high) & (inputs.advantages > 0),  # [T]
        }
        if self.config.dual_clip is not None:
            sides["dual"] = (ratio > self.config.dual_clip) & negative  # [T]
        return sides
