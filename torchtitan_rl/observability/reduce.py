"""How the values recorded under one key become one number, on one rank and over all of them.

Each reduction is an accumulator with a small picklable state. Ranks merge *states*, never reduced values: the mean of
two ranks' means of [1, 1, 1] and [0] would be 0.5, their merged states give 0.75.
"""

import math
import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
MAX_SAMPLE = 8192
"""Values of a distribution that are kept: with more, a quantile is off by about half a percent of the values."""


class Reduce(StrEnum):
    """How values of one key are merged over calls, micro-batches and ranks."""

    MEAN = "mean"
    """sum(w v) / sum(w)"""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Population standard deviation, weighted."""
    DISTRIBUTION = "distribution"
    """p05, p25, p50, p75 and p95 of all values, as `key/p05` and so on, and a histogram. A value may be a list or a 1-D
    tensor of numbers."""
    LAST = "last"
    """The latest value of the lowest rank that recorded one: for what every rank knows alike."""
    TABLE = "table"
    """A dict or a list of dicts: rows of a sample table."""


class Accumulator(Protocol):
    """What a reduction is. Values are finite; others are counted before they get here."""

    def append(self, value: Any, weight: float) -> None: ...

    def get_value(self) -> float | dict[str, float] | None:
        """The reduced value, a dict of suffix to value for a distribution, or None when empty."""

    def get_state(self) -> Any:
        """A picklable state for `merge`; sharing nothing with this accumulator."""

    def merge(self, state: Any) -> None:
        """Takes in another rank's state, which comes after this one's own values."""


class Mean:
    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def append(self, value: float, weight: float) -> None:
        self.merge((value * weight, weight))

    def get_value(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def get_state(self) -> tuple[float, float]:
        return self.total, self.weight

    def merge(self, state: tuple[float, float]) -> None:
        self.total += state[0]
        self.weight += state[1]


class Folded:
    """One number that `choose` folds the values into, two at a time; None while empty."""

    choose: ClassVar[Callable[[float, float], float]]

    def __init__(self) -> None:
        self.value: float | None = None

    def append(self, value: float, weight: float) -> None:
        self.value = value if self.value is None else self.choose(self.value, value)

    def get_value(self) -> float | None:
        return self.value

    get_state = get_value

    def merge(self, state: float | None) -> None:
        if state is not None:
            self.append(state, 1.0)


class Sum(Folded):
    choose = staticmethod(operator.add)


class Max(Folded):
    choose = staticmethod(max)


class Min(Folded):
    choose = staticmethod(min)


class Last(Folded):
    """The lowest rank's last value: `merge` only fills an empty one."""

    choose = staticmethod(lambda old, new: new)

    def merge(self, state: float | None) -> None:
        if self.value is None:
            self.value = state


class Std:
    """Welford's running variance, merged by Chan's formula: [1e8, 1e8 + 1, 1e8 + 2] gives 0.816, not 0."""

    def __init__(self) -> None:
        self.weight = self.mean = self.squares = 0.0

    def append(self, value: float, weight: float) -> None:
        self.merge((weight, value, 0.0))

    def get_value(self) -> float | None:
        return math.sqrt(max(self.squares, 0.0) / self.weight) if self.weight else None

    def get_state(self) -> tuple[float, float, float]:
        return self.weight, self.mean, self.squares

    def merge(self, state: tuple[float, float, float]) -> None:
        weight, mean, squares = state
        total = self.weight + weight
        if not total:
            return
        delta = mean - self.mean
        self.squares += squares + delta * delta * self.weight * weight / total
        self.mean += delta * weight / total
        self.weight = total


class Distribution:
    """All values, or of more than MAX_SAMPLE a uniform sample: those of the smallest random priorities.

    The smallest of several ranks' smallest are the smallest of all: ranks' samples merge into one of the pooled values.
    The seed is fixed: the same values give the same sample.
    """

    def __init__(self) -> None:
        self.values = np.empty(0)  # [n] float64
        self._priorities = np.empty(0)  # [n] float64
        self._bound = 1.0
        """Priorities from here on cannot be among the smallest."""
        self._random = np.random.default_rng(0)
        self._new: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_new = 0

    def append(self, value: float | np.ndarray, weight: float) -> None:
        values = np.atleast_1d(value)  # [m]
        if self._bound < 1.0:  # draw how many fall below the bound, and which, in place of a priority for each
            count = self._random.binomial(len(values), self._bound)
            values = values[np.sort(self._random.choice(len(values), count, replace=False, shuffle=False))]
        self._add(values, self._bound * self._random.random(len(values)))

    def get_value(self) -> dict[str, float] | None:
        self._fold()
        if not len(self.values):
            return None
        return dict(zip(QUANTILES, np.quantile(self.values, list(QUANTILES.values())).tolist(), strict=True))

    def get_state(self) -> tuple[np.ndarray, np.ndarray]:
        self._fold()
        return self.values.copy(), self._priorities.copy()

    def merge(self, state: tuple[np.ndarray, np.ndarray]) -> None:
        self._add(*state)

    def _add(self, values: np.ndarray, priorities: np.ndarray) -> None:
        self._new.append((values, priorities))
        self._num_new += len(values)
        if self._num_new > MAX_SAMPLE:
            self._fold()

    def _fold(self) -> None:
        if not self._new:
            return
        self.values = np.concatenate([self.values, *(values for values, _ in self._new)])
        self._priorities = np.concatenate([self._priorities, *(priorities for _, priorities in self._new)])
        self._new, self._num_new = [], 0
        if len(self.values) > MAX_SAMPLE:
            kept = np.argpartition(self._priorities, MAX_SAMPLE)[:MAX_SAMPLE]
            self.values, self._priorities = self.values[kept], self._priorities[kept]
            self._bound = float(self._priorities.max())


ACCUMULATORS: dict[Reduce, type[Accumulator]] = {
    Reduce.MEAN: Mean,
    Reduce.SUM: Sum,
    Reduce.MAX: Max,
    Reduce.MIN: Min,
    Reduce.STD: Std,
    Reduce.DISTRIBUTION: Distribution,
    Reduce.LAST: Last,
}
