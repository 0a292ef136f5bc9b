"""Metrics of an evaluation: accuracy, pass@k and their confidence intervals. Equal on every rank."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from torchtitan_rl.common.summary import same_everywhere
from torchtitan_rl.core.types import Episode, Group, Metric, flat
from torchtitan_rl.observability.metrics.reward_stats import finite_rewards, fraction, judgements

RESAMPLES = 1000


def evaluation_metrics(groups: Sequence[Group[Episode]], prefix: str = "evaluation") -> dict[str, Metric]:
    """Accuracy, mean@n and pass@k by the task's judgement; reward, length, format and truncation rates of the samples.

    pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) for a prompt with c of n samples correct (Chen et al.
    2021, arXiv 2107.03374), averaged over the prompts with n >= k, for k = 2, 4, 8, ... and the largest n. mean@n is
    the share of correct samples, averaged over prompts, for n > 1. `<name>_low` and `<name>_high` are the ends of the
    95 % interval over prompts. `prefix` distinguishes evaluations, such as "evaluation/sampled".
    """
    episodes = flat(groups)
    if not episodes:
        return {}
    lengths = [episode.completion.num_sampled for episode in episodes]
    metrics = {
        "length": same_everywhere(fmean(lengths)),
        "length_max": same_everywhere(float(max(lengths))),
        "clipped_fraction": fraction([episode.completion.finish_reason != "stop" for episode in episodes]),
        "format_rate": fraction([episode.scored.answer is not None for episode in episodes]),
    }
    if rewards := finite_rewards(episodes):
        metrics["reward"] = same_everywhere(fmean(rewards))
    if judged := [found for group in groups if (found := judgements(group.samples))]:
        for name, values in _by_prompt(judged).items():
            low, high = interval(values)
            metrics |= {
                name: same_everywhere(fmean(values)),
                f"{name}_low": same_everywhere(low),
                f"{name}_high": same_everywhere(high),
            }
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def evaluation_names(num_samples: int, *, judged: bool) -> set[str]:
    """The names of `evaluation_metrics` without prefix, for this number of samples a prompt.

    Args:
        judged: whether the task judges answers.
    """
    measures = _by_prompt([[True] * num_samples]) if judged else {}
    ends = {f"{name}{end}" for name in measures for end in ("", "_low", "_high")}
    return {"length", "length_max", "clipped_fraction", "format_rate", "reward"} | ends


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


def interval(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of each prompt's value.

    Right or wrong (0 or 1) has Wilson's score interval, and so have values that are all equal, where a bootstrap has no
    width. Other values, such as shares of right samples, have the percentile bootstrap with `resamples` resamples and a
    fixed seed.
    """
    of = np.asarray(values, dtype=np.float64)  # [prompts]
    if np.isin(of, (0.0, 1.0)).all() or of.min() == of.max():
        return _wilson(float(of.mean()), len(of))
    random = np.random.default_rng(0)
    means = [of[random.integers(0, len(of), len(of))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _wilson(share: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % score interval for a share of `num` prompts. Example: _wilson(1.0, 256) == (0.985, 1.0), rounded.

    Its coverage stays near 95 % for small shares, where the percentile bootstrap's is 89 % (2 % of 256 prompts).
    """
    z2 = 1.959964**2 / num
    middle, half = share + z2 / 2, math.sqrt(z2 * share * (1 - share) + z2**2 / 4)
    return (middle - half) / (1 + z2), (middle + half) / (1 + z2)
