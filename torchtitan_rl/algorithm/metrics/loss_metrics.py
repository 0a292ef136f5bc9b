"""What one micro-batch says about the loss, the policy, the ratio, the sampler and the reference."""

import torch
from torch import Tensor

from ..inputs import LOG_RATIO_LIMIT, LossInputs, safe_exp
from ..kl import kl_estimate
from ..losses import PolicyLoss
from .tally import Tally

LENGTH_BUCKETS = ((0, 32), (33, 64), (65, 128), (129, 256), (257, None))
"""Completion lengths, in tokens, both ends included; None is no limit."""


def bucket_name(bucket: tuple[int, int | None]) -> str:
    """Example: bucket_name((0, 32)) == "0-32", bucket_name((257, None)) == "257+"."""
    first, last = bucket
    return f"{first}+" if last is None else f"{first}-{last}"


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


def record_ratio(tally: Tally, loss: PolicyLoss, inputs: LossInputs) -> None:
    """The ratio the loss uses, where it clips, and the extremes over completions of the fraction clipped."""
    ratio = loss.ratio(inputs)  # [T]
    tally.mean("ratio/mean", ratio, inputs.mask)
    tally.min("ratio/min", ratio, inputs.mask)
    tally.max("ratio/max", ratio, inputs.mask)
    overflowed = inputs.log_ratio.abs() > LOG_RATIO_LIMIT  # [T]
    tally.mean("ratio/overflow_fraction", overflowed.to(ratio.dtype), inputs.mask)
    clipped = loss.clipped(inputs, ratio)
    if clipped is None:
        return
    low, high = (where.to(ratio.dtype) for where in clipped)  # [T], [T]
    tally.mean("ratio/clip_fraction", torch.maximum(low, high), inputs.mask)
    for name, where in (("low", low), ("high", high)):
        tally.mean(f"ratio/clip_fraction_{name}", where, inputs.mask)
        of_completion = inputs.sequences.mean(where)  # [S]
        tally.min(f"ratio/clip_fraction_{name}_min", of_completion, inputs.sequences.present)
        tally.max(f"ratio/clip_fraction_{name}_max", of_completion, inputs.sequences.present)


def record_sampler(tally: Tally, log_weight: Tensor, changed: Tensor, inputs: LossInputs) -> None:
    """How far the sampler is from the trainer; `log_weight` [T] is log pi_old - log mu, `changed` [T] bool."""
    difference = log_weight.abs()  # [T]
    tally.mean("sampler/logprob_diff/mean", difference, inputs.mask)
    tally.max("sampler/logprob_diff/max", difference, inputs.mask)
    weight = safe_exp(log_weight)  # [T]
    tally.mean("sampler/importance_weight/mean", weight, inputs.mask)
    tally.min("sampler/importance_weight/min", weight, inputs.mask)
    tally.max("sampler/importance_weight/max", weight, inputs.mask)
    tally.mean("sampler/corrected_fraction", changed.to(weight.dtype), inputs.mask)
    # The samples are the sampler's, so this is KL(mu || pi_old), whose d is log mu - log pi_old.
    tally.mean("sampler/kl", kl_estimate(-log_weight, "k3"), inputs.mask)
