"""Metrics of an evaluation: accuracy, pass@k and their confidence intervals. Equal on every rank."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy.special import betaincinv

from torchtitan_rl.observe.metrics.reward_stats import (
    Groups,
    clipped_fraction,
    finite_rewards,
    fraction,
    judgements,
)
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Metric, flat

SMOOTHING = 2.0
"""Prompts' worth of evidence for a design effect of 1 in `interval`. With less, one more right sample can lower an end."""


def evaluation_metrics(groups: Groups, prefix: str = "evaluation") -> dict[str, Metric]:
    """Accuracy, mean@n and pass@k by the task's judgement; reward, length, format and truncation rates of the samples.

    pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) for a prompt with c of n samples correct (Chen et al.
    2021, arXiv 2107.03374), averaged over the prompts with n >= k, for k = 2, 4, 8, ... and the largest n. mean@n is
    the share of correct samples, averaged over prompts, for n > 1. `<name>_low` and `<name>_high` are the ends of the
    95 % interval over prompts. `prefix` distinguishes evaluations, such as "evaluation/sampled".
    """
    episodes = flat(groups)
    if not episodes:
        return {}
    metrics: dict[str, Metric] = {}
    if judged := [answers for group in groups if (answers := judgements(group.samples))]:
        for name, values in _by_prompt(judged).items():
            low, high = interval(values)
            metrics |= {
                name: same_everywhere(fmean(values)),
                f"{name}_low": same_everywhere(low),
                f"{name}_high": same_everywhere(high),
            }
    if rewards := finite_rewards(episodes):
        metrics["reward"] = same_everywhere(fmean(rewards))
    lengths = [episode.completion.num_sampled for episode in episodes]
    metrics |= {
        "length": same_everywhere(fmean(lengths)),
        "length_max": same_everywhere(float(max(lengths))),
        "clipped_fraction": clipped_fraction(episodes),
        "format_rate": fraction([e.scored.answer is not None for e in episodes]),
    }
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def _by_prompt(judged: list[list[bool]]) -> dict[str, list[float]]:
    """The values per prompt of each measure: accuracy, and with several samples a prompt also mean@n and pass@k."""
    largest = max(map(len, judged))
    shares = [fmean(group) for group in judged]
    measures = {"accuracy": shares}
    if largest > 1:
        measures[f"mean@{largest}"] = shares
        for k in sorted({2**power for power in range(1, largest.bit_length())} | {largest}):
            measures[f"pass@{k}"] = [pass_at(k, len(g), sum(g)) for g in judged if len(g) >= k]
    return measures


def pass_at(k: int, n: int, c: int) -> float:
    """The chance that k of n samples include one of the c correct samples. Example: pass_at(1, 4, 1) == 0.25"""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of each prompt's value in 0..1: a share of right samples, or right or wrong.

    Clopper and Pearson's interval for a share of m / d prompts. The design effect d is the variance of the values over
    that of right or wrong prompts with the same mean: 1 where every prompt is all right or all wrong, less where shares
    vary less. Both variances are sums over prompts, plus SMOOTHING.
    """
    of = np.asarray(values, dtype=np.float64)  # [prompts]
    share = float(of.mean())
    variance, largest = float(((of - share) ** 2).sum()), len(of) * share * (1 - share)
    effect = (variance + SMOOTHING) / (largest + SMOOTHING)
    prompts = len(of) / effect
    right, wrong = share * prompts, (1 - share) * prompts
    # Less than a millionth of a prompt is none, because rounding may leave such a mean.
    low = float(betaincinv(right, wrong + 1, 0.025)) if right > 1e-6 else 0.0
    high = float(betaincinv(right + 1, wrong, 0.975)) if wrong > 1e-6 else 1.0
    return low, high
