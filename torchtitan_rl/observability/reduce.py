"""How the values recorded under one key become one number, on one rank and over all of them.

Each reduction is an accumulator with a small picklable state. Ranks merge *states*, never reduced values: the mean of
two ranks' means of [1, 1, 1] and [0] would be 0.5, their merged states give 0.75.
"""

import math
import operator
from array import array
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


class Reduce(StrEnum):
    """How values of one key are merged over calls, micro-batches and ranks."""

    MEAN = "mean"
    """sum(w v) / sum(w)"""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Population standard deviation, weighted."""
    QUANTILES = "quantiles"
    """Exact p05, p25, p50, p75 and p95 of all values, as `key/p05` and so on."""
    LAST = "last"
    """The latest value of the lowest rank that recorded one."""
    TABLE = "table"
    """A dict or a list of dicts: rows of a sample table."""


class Accumulator(Protocol):
    """What a reduction is. Values are finite floats; non-finite ones are counted before they get here."""

    def append(self, value: float, weight: float) -> None: ...

    def get_value(self) -> float | dict[str, float] | None:
        """The reduced value, a dict of suffix to value for quantiles, or None when empty."""

    def get_state(self) -> Any:
        """A picklable state for `merge`; sharing nothing with this accumulator."""

    def merge(self, state: Any) -> None:
        """Takes in another rank's state, which comes after this one's own values."""

    def reset(self) -> None: ...


class Mean:
    def __init__(self) -> None:
        self.reset()

    def append(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.weight += weight

    def get_value(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def get_state(self) -> tuple[float, float]:
        return self.total, self.weight

    def merge(self, state: tuple[float, float]) -> None:
        self.total += state[0]
        self.weight += state[1]

    def reset(self) -> None:
        self.total = self.weight = 0.0


class Folded:
    """One number that `choose` folds the values into, two at a time; None while empty."""

    choose: ClassVar[Callable[[float, float], float]]

    def __init__(self) -> None:
        self.reset()

    def append(self, value: float, weight: float) -> None:
        self.value = value if self.value is None else self.choose(self.value, value)

    def get_value(self) -> float | None:
        return self.value

    def get_state(self) -> float | None:
        return self.value

    def merge(self, state: float | None) -> None:
        if state is not None:
            self.append(state, 1.0)

    def reset(self) -> None:
        self.value: float | None = None


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
        self.reset()

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

    def reset(self) -> None:
        self.weight = self.mean = self.squares = 0.0


class Quantiles:
    """Every value is kept (8 bytes each), so that quantiles over ranks are exact and histograms can be drawn."""

    def __init__(self) -> None:
        self.reset()

    def append(self, value: float, weight: float) -> None:
        self.values.append(value)

    def get_value(self) -> dict[str, float] | None:
        if not self.values:
            return None
        found = np.quantile(np.asarray(self.values), list(QUANTILES.values()))
        return dict(zip(QUANTILES, found.tolist(), strict=True))

    def get_state(self) -> array:
        return self.values[:]

    def merge(self, state: array) -> None:
        self.values.extend(state)

    def reset(self) -> None:
        self.values = array("d")


ACCUMULATORS: dict[Reduce, type[Accumulator]] = {
    Reduce.MEAN: Mean,
    Reduce.SUM: Sum,
    Reduce.MAX: Max,
    Reduce.MIN: Min,
    Reduce.STD: Std,
    Reduce.QUANTILES: Quantiles,
    Reduce.LAST: Last,
}
