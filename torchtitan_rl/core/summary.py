"""Summaries of plain lists that are the same on every rank."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from torchtitan_rl.core.types import Metric

QUANTILES = (5, 25, 50, 75, 95)


def same_everywhere(value: float) -> Metric:
    """A number every rank computed from the same episodes: every rank records it, and the lowest rank's is kept."""
    return Metric(value=value, reduction="last")


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    return fmean(values)


def std(values: Sequence[float]) -> float:
    """Standard deviation with N (a description of these values, not an estimate)."""
    return float(np.std(values))


def quantile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks. Example: quantile([0.0, 1.0], 25) == 0.25."""
    return float(np.percentile(values, percent))


def describe(
    prefix: str, values: Sequence[float], parts: Sequence[str] = ("mean", "std", "min", "max")
) -> dict[str, Metric]:
    """`<prefix>/<part>` for each part: mean, std, min, max, p50; "quantiles": p05 to p95. No values, no keys."""
    if not values:
        return {}
    simple = {"mean": mean, "std": std, "min": min, "max": max}
    names = [name for part in parts for name in ([f"p{q:02d}" for q in QUANTILES] if part == "quantiles" else [part])]
    return {
        f"{prefix}/{name}": same_everywhere(
            simple[name](values) if name in simple else quantile(values, float(name[1:]))
        )
        for name in names
    }


def fraction(where: Sequence[bool]) -> Metric:
    """The share that is true of at least one."""
    return same_everywhere(sum(where) / len(where))
