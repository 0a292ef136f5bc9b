"""What one micro-batch says about the loss, the policy, the ratio, the sampler and the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_rl.core.algorithm.inputs import LOG_RATIO_LIMIT, LossInputs, safe_exp
from torchtitan_rl.core.algorithm.kl import kl_estimate
from torchtitan_rl.core.algorithm.losses import PolicyLoss
from torchtitan_rl.core.algorithm.mismatch import Correction
from torchtitan_rl.core.types import Metric

LENGTH_BUCKETS = ((0, 32), (33, 64), (65, 128), (129, 256), (257, None))
"""Sampled tokens of a completion, both ends included; None is no limit."""
MAX_DISTRIBUTION_VALUES = 4096
"""Most values that one micro-batch adds to a distribution: evenly spaced among its loss tokens."""


def bucket_name(bucket: tuple[int, int | None]) -> str:
    """Example: bucket_name((0, 32)) == "0-32", bucket_name((257, None)) == "257+"."""
    first, last = bucket
    return f"{first}+" if last is None else f"{first}-{last}"


class Tally:
    """Collects tensors and turns them into `Metric`s, all 0-d ones in one transfer from the device."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Tensor, str, Tensor]] = {}
        self._distributions: dict[str, Metric] = {}

    def mean(self, key: str, values: Tensor, mask: Tensor) -> None:
        """The mean of `values` where `mask` is not 0 (same shape), weighted by how many there are."""
        count = mask.sum()
        total = torch.where(mask > 0, values, 0.0).sum()
        self._entries[key] = (total / count.clamp(min=1), "mean", count)

    def weighted_mean(self, key: str, value: Tensor, weight: Tensor) -> None:
        """A 0-d mean that stands for `weight` units."""
        self._entries[key] = (value, "mean", weight)

    def extremes(self, prefix: str, values: Tensor, mask: Tensor, kinds: Sequence[str] = ("min", "max")) -> None:
        """`<prefix>min` and `<prefix>max` of `values` where `mask` is not 0 (same shape)."""
        for kind in kinds if values.numel() > 0 else ():
            inside = torch.where(mask > 0, values, float("inf" if kind == "min" else "-inf"))
            self._entries[f"{prefix}{kind}"] = (getattr(inside, kind)(), kind, mask.sum())

    def sum(self, key: str, value: Tensor) -> None:
        """A 0-d count, kept even when it is 0."""
        self._entries[key] = (value, "sum", torch.ones_like(value))

    def distribution(self, key: str, values: Tensor, mask: Tensor) -> None:
        """`values` where `mask` is not 0 (same shape), at most MAX_DISTRIBUTION_VALUES of them."""
        inside = values[mask > 0]  # [n]
        every = -(-len(inside) // MAX_DISTRIBUTION_VALUES)
        if every:
            sampled = inside[::every].float().cpu()  # [at most MAX_DISTRIBUTION_VALUES]
            self._distributions[key] = Metric(value=sampled, reduction="distribution")

    def to_metrics(self) -> dict[str, Metric]:
        """All of it; a mean or extreme over nothing is left out, never reported as 0."""
        if not self._entries:
            return {}
        values = [value for value, _, _ in self._entries.values()]
        weights = [weight for _, _, weight in self._entries.values()]
        flat = torch.stack([number.detach().double() for number in values + weights]).tolist()  # one transfer
        half = len(values)
        return self._distributions | {
            key: Metric(value=flat[i], reduction=reduction, weight=flat[half + i])
            for i, (key, (_, reduction, _)) in enumerate(self._entries.items())
            if flat[half + i] > 0
        }


def record_losses(tally: Tally, terms: dict[str, Tensor], num_tokens: Tensor, inputs: LossInputs) -> None:
    """`loss/<name>` of each term, as a token-weighted mean whose merge is the step's value.

    A term is this micro-batch's share, already divided by the whole update's normaliser. Scaled by N / n (n its own
    loss tokens) and weighted by n, shares merge by the mean into their sum, and several updates a step into their mean.
    """
    scale = inputs.normalizers.num_tokens / num_tokens.clamp(min=1)  # 0-d
    for name, share in terms.items():
        tally.weighted_mean(f"loss/{name}", share.detach() * scale, num_tokens)


def record_divergence(tally: Tally, prefix: str, log_ratio: Tensor, inputs: LossInputs) -> None:
    """KL by estimator, and k3 by completion length; `log_ratio` [T] is log pi - log of the other policy."""
    for estimator in ("k1", "k2", "k3"):
        tally.mean(f"{prefix}/kl_{estimator}", kl_estimate(log_ratio, estimator), inputs.mask)
    k3 = kl_estimate(log_ratio, "k3")  # [T]
    lengths = inputs.sequences.expand(inputs.sequences.lengths)  # [T]
    for bucket in LENGTH_BUCKETS:
        first, last = bucket
        inside = (lengths >= first) & (lengths <= (last or float("inf")))  # [T]
        tally.mean(f"{prefix}/kl_k3/length_{bucket_name(bucket)}", k3, inputs.mask * inside)


def record_ratio(tally: Tally, loss: PolicyLoss | None, inputs: LossInputs) -> None:
    """The ratio the loss uses, where it clamps and clips, and the extremes over completions of the share clipped.

    Args:
        loss: None where tokens have no loss of their own: then the plain ratio, and nothing clamps it.
    """
    ratio = safe_exp(inputs.log_ratio) if loss is None else loss.ratio(inputs)  # [T]
    tally.mean("ratio/mean", ratio, inputs.mask)
    tally.extremes("ratio/", ratio, inputs.mask)
    if loss is None or not loss.uses_ratio:
        return
    overflowed = loss.log_ratio(inputs).abs() > LOG_RATIO_LIMIT  # [T]
    tally.mean("ratio/overflow_fraction", overflowed.to(ratio.dtype), inputs.mask)
    clipped = {side: where.to(ratio.dtype) for side, where in loss.clipped(inputs, ratio).items()}  # [T] each
    if clipped:
        tally.mean("ratio/clip_fraction", torch.stack(list(clipped.values())).amax(dim=0), inputs.mask)
    for side, where in clipped.items():
        key = f"ratio/clip_fraction_{side}"
        tally.mean(key, where, inputs.mask)
        tally.extremes(f"{key}_", inputs.sequences.mean(where), inputs.sequences.present)  # of [S]


def record_sampler(tally: Tally, log_weight: Tensor, correction: Correction, inputs: LossInputs) -> None:
    """How far the sampler is from the trainer; `log_weight` [T] is log pi_old - log mu."""
    difference = log_weight.abs()  # [T]
    tally.mean("sampler/logprob_diff/mean", difference, inputs.mask)
    tally.extremes("sampler/logprob_diff/", difference, inputs.mask, ("max",))
    tally.distribution("sampler/logprob_diff", difference, inputs.mask)
    weight = safe_exp(log_weight)  # [T]
    tally.mean("sampler/importance_weight/mean", weight, inputs.mask)
    tally.extremes("sampler/importance_weight/", weight, inputs.mask)
    tally.mean("sampler/corrected_fraction", correction.changed.to(weight.dtype), inputs.mask)
    # The samples are the sampler's, so this is KL(mu || pi_old), whose d is log mu - log pi_old.
    tally.mean("sampler/kl", kl_estimate(-log_weight, "k3"), inputs.mask)
    weight, count = weight * inputs.mask, inputs.mask.sum()  # [T], 0-d
    share = weight.sum() ** 2 / (count * (weight**2).sum()).clamp(min=torch.finfo(weight.dtype).tiny)  # 0-d
    tally.weighted_mean("sampler/effective_sample_size", share, count)
