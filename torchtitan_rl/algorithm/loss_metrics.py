"""Metrics of one micro-batch: the loss, the policy, the ratio, the sampler and the reference."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_rl.algorithm.kl import kl_estimate
from torchtitan_rl.algorithm.losses.loss_inputs import LOG_RATIO_LIMIT, LossInputs, safe_exp
from torchtitan_rl.algorithm.mismatch import Correction
from torchtitan_rl.types import Metric, TrainBatch

LENGTH_BUCKETS = {
    "0-32": (0, 32),
    "33-64": (33, 64),
    "65-128": (65, 128),
    "129-256": (129, 256),
    "257+": (257, math.inf),
}
"""Name: smallest and largest number of sampled tokens, both included."""
MAX_DISTRIBUTION_VALUES = 4096
"""The most values that one micro-batch adds to a distribution. They are evenly spaced among its loss tokens."""


class Tally:
    """Collects tensors on the device and turns them into `Metric`s on the host, when these are asked for."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Tensor, str, Tensor]] = {}
        self._distributions: dict[str, Tensor] = {}  # [2, n] each: values and mask

    def put(
        self, key: str, value: Tensor, weight: Tensor | None = None, reduction: str = "mean"
    ) -> None:
        """Add a 0-d `value`; a mean stands for `weight` units, 0-d."""
        if weight is None:
            weight = torch.ones_like(value)  # 0-d
        self._entries[key] = value, reduction, weight

    def mean(self, key: str, values: Tensor, mask: Tensor) -> None:
        """Add the mean of `values` where `mask` is not 0 (same shape), weighted by their number."""
        count = mask.sum()  # 0-d
        total = torch.where(mask > 0, values, 0.0).sum()  # 0-d
        self.put(key, total / count.clamp(min=1), count)

    def extremes(
        self, prefix: str, values: Tensor, mask: Tensor, kinds: Sequence[str] = ("min", "max")
    ) -> None:
        """Add `<prefix>min` and `<prefix>max` of `values` where `mask` is not 0 (same shape)."""
        if values.numel() == 0:
            return
        if "min" in kinds:
            least = torch.where(mask > 0, values, math.inf).min()  # 0-d
            self.put(f"{prefix}min", least, mask.sum(), "min")
        if "max" in kinds:
            most = torch.where(mask > 0, values, -math.inf).max()  # 0-d
            self.put(f"{prefix}max", most, mask.sum(), "max")

    def distribution(self, key: str, values: Tensor, mask: Tensor) -> None:
        """Add `values` where `mask` is not 0 (same shape), at most MAX_DISTRIBUTION_VALUES of them."""
        values = values.detach().float()  # [n]
        self._distributions[key] = torch.stack([values, mask.float()])  # [2, n]

    def numbers(self) -> Tensor:
        """All that `to_metrics` needs, in one tensor on the device: [numbers] float64."""
        values = [value for value, _, _ in self._entries.values()]
        weights = [weight for _, _, weight in self._entries.values()]
        parts = [*values, *weights, *self._distributions.values()]
        return torch.cat([part.detach().double().flatten() for part in parts])

    def to_metrics(self, numbers: Tensor) -> dict[str, Metric]:
        """All metrics. A mean or extreme over no values is left out, not reported as 0.

        Args:
            numbers: `self.numbers()` on the host.
        """
        count = len(self._entries)
        sizes = [row.numel() for row in self._distributions.values()]
        values, weights, *rows = numbers.split([count, count, *sizes])
        metrics: dict[str, Metric] = {}
        for key, row in zip(self._distributions, rows, strict=True):
            kept = _thinned(row)  # [at most MAX_DISTRIBUTION_VALUES]
            if len(kept):
                metrics[key] = Metric(value=kept, reduction="distribution")
        scalars = zip(self._entries.items(), values.tolist(), weights.tolist(), strict=True)
        for (key, (_, reduction, _)), value, weight in scalars:
            if weight > 0:
                metrics[key] = Metric(value=value, reduction=reduction, weight=weight)
        return metrics


def _thinned(row: Tensor) -> Tensor:
    """Values and mask [2 n] on the host -> the values to keep. On a device, indexing with a mask waits for its sum."""
    values, mask = row.unflatten(0, (2, -1))  # [n] each
    inside = values[mask > 0]  # [loss tokens]
    every = max(1, -(-len(inside) // MAX_DISTRIBUTION_VALUES))
    return inside[::every].float()  # [at most MAX_DISTRIBUTION_VALUES]


@torch.no_grad()
def microbatch_tally(
    batch: TrainBatch,
    inputs: LossInputs,
    terms: dict[str, Tensor],
    log_pi_old: Tensor,
    correction: Correction,
    from_engine: bool,
) -> Tally:
    """The metrics of one micro-batch.

    Args:
        terms: the parts of its share of the loss, 0-d each.
        log_pi_old: [T]
        from_engine: whether the engine has sampled the tokens, so that trainer and sampler are compared.
    """
    tally = Tally()
    num_tokens = batch.loss_mask.sum()  # 0-d
    tally.put("nonfinite/tokens", num_tokens - inputs.mask.sum(), reduction="sum")
    _record_losses(tally, terms, num_tokens, inputs)
    tally.mean("policy/entropy", inputs.entropy, inputs.mask)
    tally.distribution("policy/token_entropy", inputs.entropy, inputs.mask)
    _record_divergence(tally, "policy", log_pi_old - inputs.logprobs, inputs)
    if inputs.reference_logprobs is not None:
        log_ratio = inputs.logprobs - inputs.reference_logprobs  # [T]
        _record_divergence(tally, "reference", log_ratio, inputs)
    _record_ratio(tally, inputs)
    for key, (values, mask) in inputs.report.metrics.items():
        tally.mean(key, values, mask)
    if from_engine:
        fresh = inputs.mask if batch.fresh_mask is None else inputs.mask * batch.fresh_mask  # [T]
        _record_sampler(tally, log_pi_old - inputs.sampler_logprobs, correction, inputs, fresh)
    return tally


def _record_losses(
    tally: Tally, terms: dict[str, Tensor], num_tokens: Tensor, inputs: LossInputs
) -> None:
    """`loss/<name>` of each term, as a token-weighted mean that merges into the step's value.

    A term is this micro-batch's share, already divided by the whole update's normaliser. It is scaled by N / n and
    weighted by n, the micro-batch's own loss tokens. The weighted mean of an update's shares is then their sum, and
    several updates in a step give their mean.
    """
    scale = inputs.normalizers.num_tokens / num_tokens.clamp(min=1)  # 0-d
    for name, share in terms.items():
        tally.put(f"loss/{name}", share.detach() * scale, num_tokens)


def _record_divergence(tally: Tally, prefix: str, log_ratio: Tensor, inputs: LossInputs) -> None:
    """KL(p || q) by estimator, and k3 by completion length. `log_ratio` [T] is log p - log q of tokens drawn from p."""
    for estimator in ("k1", "k2", "k3"):
        tally.mean(f"{prefix}/kl_{estimator}", kl_estimate(log_ratio, estimator), inputs.mask)
    k3 = kl_estimate(log_ratio, "k3")  # [T]
    lengths = inputs.sequences.expand(inputs.sequences.num_loss_tokens)  # [T]
    for name, (least, most) in LENGTH_BUCKETS.items():
        inside = inputs.mask * ((lengths >= least) & (lengths <= most))  # [T]
        tally.mean(f"{prefix}/kl_k3/length_{name}", k3, inside)
        tally.put(f"{prefix}/tokens/length_{name}", inside.sum(), inside.sum(), "sum")


def _record_ratio(tally: Tally, inputs: LossInputs) -> None:
    """The ratio that the loss has reported, its clamped and clipped shares, and the extremes of the clipped share by
    completion. If it has reported none, the plain ratio, which is neither clamped nor clipped."""
    report = inputs.report
    ratio = safe_exp(inputs.log_ratio) if report.ratio is None else report.ratio  # [T]
    tally.mean("ratio/mean", ratio, inputs.mask)
    tally.extremes("ratio/", ratio, inputs.mask)
    if report.ratio is None:
        return
    overflowed = report.log_ratio.abs() > LOG_RATIO_LIMIT  # [T]
    tally.mean("ratio/overflow_fraction", overflowed.to(ratio.dtype), inputs.mask)
    if report.clipped:
        on_any_side = torch.stack(list(report.clipped.values())).any(dim=0)  # [T]
        tally.mean("ratio/clip_fraction", on_any_side.to(ratio.dtype), inputs.mask)
    for side, is_clipped in report.clipped.items():
        key, share = f"ratio/clip_fraction_{side}", is_clipped.to(ratio.dtype)  # [T]
        tally.mean(key, share, inputs.mask)
        tally.extremes(f"{key}_", inputs.sequences.mean(share), inputs.sequences.present)  # of [S]


def _record_sampler(
    tally: Tally, log_weight: Tensor, correction: Correction, inputs: LossInputs, fresh: Tensor
) -> None:
    """The difference between sampler and trainer.

    Args:
        log_weight: [T] log pi_old - log mu.
        fresh: [T] 1 on loss tokens of the newest weights. `sampler/logprob_diff` leaves out older ones; the rest has
            all.
    """
    difference = log_weight.abs()  # [T]
    tally.mean("sampler/logprob_diff/mean", difference, fresh)
    tally.extremes("sampler/logprob_diff/", difference, fresh, ("max",))
    tally.distribution("sampler/logprob_diff", difference, fresh)
    weight = safe_exp(log_weight)  # [T]
    tally.mean("sampler/importance_weight/mean", weight, inputs.mask)
    tally.extremes("sampler/importance_weight/", weight, inputs.mask)
    tally.mean("sampler/corrected_fraction", correction.changed.to(weight.dtype), inputs.mask)
    # The samples come from mu, so this is KL(mu || pi_old), with d = log mu - log pi_old.
    tally.mean("sampler/kl", kl_estimate(-log_weight, "k3"), inputs.mask)
    weight = weight * inputs.mask  # [T]
    count = inputs.mask.sum()  # 0-d
    squares = (count * (weight**2).sum()).clamp(min=torch.finfo(weight.dtype).tiny)  # 0-d
    tally.put("sampler/effective_sample_size", weight.sum() ** 2 / squares, count)
