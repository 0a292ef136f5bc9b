"""Metrics of plain lists that are equal on every rank."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from torchtitan_rl.types import Metric


def same_everywhere(value: float) -> Metric:
    """A number that every rank computes from the same episodes. All ranks record it, and the lowest rank's is kept."""
    return Metric(value=value, reduction="last")


def describe(
    prefix: str, values: Sequence[float], parts: Sequence[str] = ("mean", "std", "min", "max")
) -> dict[str, Metric]:
    """`<prefix>/<part>` for each part: mean, std (with N), min or max. Empty without values."""
    if not values:
        return {}
    statistics = {
        "mean": fmean,
        "std": lambda numbers: float(np.std(numbers)),
        "min": min,
        "max": max,
    }
    return {f"{prefix}/{name}": same_everywhere(statistics[name](values)) for name in parts}
