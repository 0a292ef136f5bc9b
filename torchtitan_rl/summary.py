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
    """`<prefix>/<part>` for each part: mean, std (with N), min, max, or a percentile such as p05. Empty without values."""
    if not values:
        return {}
    simple = {"mean": fmean, "std": lambda numbers: float(np.std(numbers)), "min": min, "max": max}
    found = {name: simple[name](values) for name in parts if name in simple}
    found |= {
        name: float(np.percentile(values, float(name[1:]))) for name in parts if name not in simple
    }
    return {f"{prefix}/{name}": same_everywhere(found[name]) for name in parts}
