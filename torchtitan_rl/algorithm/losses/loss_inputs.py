"""What a loss reads of a packed micro-batch, and what it reports."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan_rl.types import Normalizers

LOG_RATIO_LIMIT = 20.0
"""Clamp on |log ratio|. e^20 is 4.9e8, whose square fits float32, so one token cannot make the gradient norm infinite.
Clamped tokens get no gradient through the ratio and are counted."""


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
class LossReport:
    """What the loss has reported of its micro-batch, without gradient."""

    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(values, mask of those in the mean) by key, [T] each."""
    ratio: Tensor | None = None
    """[T] the ratio that it uses; None for a loss that uses none."""
    log_ratio: Tensor | None = None
    """[T] its logarithm before clamping."""
    clipped: dict[str, Tensor] = field(default_factory=dict)
    """[T] bool by side ("low", "high", ...), true where clipping changes the gradient. Empty: no clipping."""


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
    """[T] H(pi) in nats, with gradient."""
    sampler_logprobs: Tensor
    """[T] log mu, no gradient; log pi_old for a loss with `from_engine` False."""
    reference_logprobs: Tensor | None
    """[T] log pi_ref, no gradient; None without a reference."""
    correction: Tensor
    """[T] the weight of the mismatch correction, no gradient; 1 without a correction."""
    sequences: Sequences
    group_ids: Tensor
    """[S] int64"""
    normalizers: Normalizers
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] each, by name, of `Loss.reads`."""
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, by name, of `Loss.reads`."""
    report: LossReport = field(default_factory=LossReport)
    """What the loss reports, for `log_metric` and `report_ratio`."""

    def log_metric(self, key: str, values: Tensor, where: Tensor | None = None) -> None:
        """Log the mean of `values` [T] over the loss tokens, or over those at which `where` [T] is true."""
        mask = self.mask if where is None else self.mask * where  # [T]
        self.report.metrics[key] = values.detach(), mask

    def report_ratio(
        self, ratio: Tensor, log_ratio: Tensor | None = None, **clipped: Tensor
    ) -> None:
        """Report the ratio that the loss uses as `ratio/...`.

        Args:
            ratio: [T]
            log_ratio: [T] its logarithm before clamping; None: log pi - log pi_old.
            clipped: [T] bool by side ("low", "high", ...), true where clipping changes the gradient.
        """
        log_ratio = self.log_ratio if log_ratio is None else log_ratio  # [T]
        self.report.ratio, self.report.log_ratio = ratio.detach(), log_ratio.detach()
        self.report.clipped = clipped

    @property
    def log_ratio(self) -> Tensor:
        """[T] logprobs - old_logprobs. Where pi_old is pi it is exactly 0, still with the gradient of log pi."""
        return self.logprobs - self.old_logprobs


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the exponent clamped to +-LOG_RATIO_LIMIT. Any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """[T] `positive` where A >= 0, else `negative`, in the dtype of the advantages."""
    return torch.where(advantages >= 0, torch.full_like(advantages, positive), negative)
