"""Reductions: how the values recorded under one key become one number, on one rank and over all ranks.

A reduction keeps a state. Values are merged into it, and ranks merge their *states*, never reduced values: averaging
the means of [1, 1, 1] and [0] would give 0.5; merging the states gives 0.75.
"""

import math
import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
MAX_SAMPLE = 8192
"""Values kept of a distribution. If there are more, a quantile's rank is off by about 0.5 % of the values."""


class Reduce(StrEnum):
    """The way values of one key are merged over calls, micro-batches and ranks."""

    MEAN = "mean"
    """sum(w v) / sum(w)"""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Population standard deviation, weighted."""
    DISTRIBUTION = "distribution"
    """Quantiles of all values as `key/p05`, p25, p50, p75 and p95, and a histogram. A value may be a list or a 1-D
    tensor of numbers."""
    LAST = "last"
    """The latest value of the lowest rank that recorded one. For values that are equal on every rank."""
    TABLE = "table"
    """Rows of a sample table. A value is a dict or a list of dicts."""


Moments = tuple[float, float, float]


class Formula(NamedTuple):
    """A reduction to one number."""

    state: Callable[[float, float], Any]
    """Returns the state of one value and its weight."""
    merge: Callable[[Any, Any], Any]
    """Merges an earlier and a later state. The state of a higher rank counts as the earlier one."""
    value: Callable[[Any], float | None]
    """Returns the number for a state; None if there is none."""


def _chan(a: Moments, b: Moments) -> Moments:
    """Merges two states (weight, mean, sum of squared deviations) by Chan's formula.

    It stays exact for large means: the standard deviation of [1e8, 1e8 + 1, 1e8 + 2] is 0.816, not 0.
    """
    weight, delta = a[0] + b[0], b[1] - a[1]
    share = b[0] / weight if weight else 0.0
    return weight, a[1] + delta * share, a[2] + b[2] + delta * delta * a[0] * share


def _one(choose: Callable[[float, float], float]) -> Formula:
    return Formula(lambda value, weight: value, choose, lambda state: state)


FORMULAS = {
    Reduce.MEAN: Formula(
        state=lambda value, weight: (value * weight, weight),
        merge=lambda a, b: (a[0] + b[0], a[1] + b[1]),
        value=lambda state: state[0] / state[1] if state[1] else None,
    ),
    Reduce.STD: Formula(
        state=lambda value, weight: (weight, value, 0.0),
        merge=_chan,
        value=lambda state: math.sqrt(max(state[2], 0.0) / state[0]) if state[0] else None,
    ),
    Reduce.SUM: _one(operator.add),
    Reduce.MAX: _one(max),
    Reduce.MIN: _one(min),
    Reduce.LAST: _one(lambda earlier, later: later),
}


class Series:
    """The state of one key in one step, with its reduction."""

    def __init__(self, reduction: Reduce) -> None:
        self.reduction = reduction
        self.non_finite = 0
        """Count of NaN and infinite values, shown as `key/non_finite`. They are excluded from the reduction."""
        self._state: Any = None

    def append(self, value: Any, weight: float = 1.0) -> None:
        """Adds one value: a float, or a 0-d tensor on any device."""
        number, weight = float(value), float(weight)
        if math.isfinite(number) and math.isfinite(weight):
            formula = FORMULAS[self.reduction]
            state = formula.state(number, weight)
            self._state = state if self._state is None else formula.merge(self._state, state)
        else:
            self.non_finite += 1

    def merge(self, other: "Series") -> None:
        """Merges a higher rank's series, with the same reduction, into this one."""
        self.non_finite += other.non_finite
        if self._state is None:
            self._state = other._state
        elif other._state is not None:
            self._state = FORMULAS[self.reduction].merge(other._state, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values and arrays of the state."""
        left_out = ("reduction", "_random")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def values(self, key: str) -> dict[str, float]:
        """The numbers to show, by name: those of the finite values, if there are any, and the count of others."""
        others = {f"{key}/non_finite": float(self.non_finite)} if self.non_finite else {}
        return self._finite(key) | others

    def _finite(self, key: str) -> dict[str, float]:
        value = None if self._state is None else FORMULAS[self.reduction].value(self._state)
        return {} if value is None else {key: value}


class Distribution(Series):
    """All values, or a uniform sample of MAX_SAMPLE: each value gets a random priority, and the smallest are kept.

    Merging the ranks' samples in the same way gives a uniform sample of the pooled values. The seed is fixed, so equal
    values give equal samples.
    """

    def __init__(self, reduction: Reduce) -> None:
        super().__init__(reduction)
        self.numbers = np.empty(0)
        """The finite values, or the sample of them: float64 [n]."""
        self._priorities = np.empty(0)  # [n]
        self._random = np.random.default_rng(0)

    def append(self, value: np.ndarray | Tensor, weight: float = 1.0) -> None:
        """Adds an array or a tensor [n]. The weight is ignored."""
        values = value.double().cpu().numpy() if isinstance(value, Tensor) else value  # [n]
        finite = np.isfinite(values)
        self.non_finite += len(values) - int(np.count_nonzero(finite))
        values = values[finite]
        self._add(values, self._random.random(len(values)))

    def merge(self, other: "Distribution") -> None:
        self.non_finite += other.non_finite
        self._add(other.numbers, other._priorities)

    def _finite(self, key: str) -> dict[str, float]:
        if not len(self.numbers):
            return {}
        quantiles = np.quantile(self.numbers, list(QUANTILES.values())).tolist()
        return {f"{key}/{name}": q for name, q in zip(QUANTILES, quantiles, strict=True)}

    def _add(self, values: np.ndarray, priorities: np.ndarray) -> None:
        self.numbers = np.concatenate([self.numbers, values])
        self._priorities = np.concatenate([self._priorities, priorities])
        if len(self.numbers) > MAX_SAMPLE:
            kept = np.argpartition(self._priorities, MAX_SAMPLE)[:MAX_SAMPLE]
            self.numbers, self._priorities = self.numbers[kept], self._priorities[kept]


def series_of(reduction: Reduce) -> Series:
    return (Distribution if reduction is Reduce.DISTRIBUTION else Series)(reduction)
