"""Summaries of plain lists that are the same on every rank."""

import math

from torchtitan_rl.types import Metric

QUANTILES = (5, 25, 50, 75, 95)


def same_everywhere(value: float) -> Metric:
    """A number every rank computed from the same episodes: "last" keeps it as it is however many ranks report it."""
    return Metric(value=value, reduction="last")


def mean(values: list[float]) -> float:
    """Arithmetic mean of at least one number."""
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """Standard deviation with N (a description of these values, not an estimate)."""
    center = mean(values)
    return math.sqrt(sum((value - center) * (value - center) for value in values) / len(values))


def quantile(values: list[float], percent: float) -> float:
    """Linear interpolation between the closest ranks. Example: quantile([0.0, 1.0], 25) == 0.25."""
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


def describe(
    prefix: str, values: list[float], parts: tuple[str, ...] = ("mean", "std", "min", "max")
) -> dict[str, Metric]:
    """`<prefix>/<part>` for each part: mean, std, min, max, and "quantiles" for p05 to p95. No values, no keys."""
    if not values:
        return {}
    simple = {"mean": mean, "std": std, "min": min, "max": max}
    metrics = {f"{prefix}/{part}": same_everywhere(simple[part](values)) for part in parts if part in simple}
    if "quantiles" in parts:
        metrics |= {f"{prefix}/p{percent:02d}": same_everywhere(quantile(values, percent)) for percent in QUANTILES}
    return metrics
