"""Statistical tests behind the verdicts: has a metric changed over a run, and do two shares of right answers differ?"""

import functools
import math
from bisect import bisect_left
from itertools import pairwise
from statistics import fmean
from typing import Literal

Trend = Literal["rose", "fell", "unclear", "too few"]

MIN_STEPS = 6
"""With fewer values even a straight line may be chance."""
ALPHA = 0.05
"""Share of runs without a change in which a test may find one."""

_CORRELATION = ((6, 0.95), (8, 0.92), (10, 0.895), (12, 0.875), (14, 0.85))
"""(number of values, |correlation with the step| that AR(0.7) noise exceeds in under 5 % of runs)."""
_T = ((15, 5.6), (20, 4.9), (30, 3.85), (50, 3.0), (100, 2.45), (200, 2.2), (400, 2.1), (10_000, 2.0))
"""(number of values, |t| that AR(0.7) noise exceeds in under 5 % of runs). Both tables are simulated; independent noise exceeds
them less often."""


def trend(values: list[float]) -> Trend:
    """Whether the values have risen or fallen over the run, or only as much as noise does.

    Steps of a run are not independent: a lucky step changes the policy of the next. The limits are such that noise with an
    autocorrelation of up to 0.7 from step to step gives "rose" or "fell" in at most 5 % of runs.

    Below 15 values the test is on their correlation with the step. From 15 on it is on the slope of a straight line, whose
    standard error has two corrections: residuals are taken from a cubic, so that a curve that rises and then levels off does not
    count as noise, and the variance is multiplied by (1 + r) / (1 - r), where r is the residuals' autocorrelation.
    """
    n = len(values)
    if n < MIN_STEPS:
        return "too few"
    line, *curved = _polynomials(n)
    centred = [value - fmean(values) for value in values]
    slope = _dot(line, centred)
    total = _dot(centred, centred)
    if total <= 1e-18 * n * max(abs(value) for value in values) ** 2:  # constant
        return "unclear"
    if n < _T[0][0]:
        clear = abs(slope) / math.sqrt(total) > _limit(_CORRELATION, n)
    else:
        clear = abs(slope) > _limit(_T, n) * _standard_error(centred, [line, *curved])
    return ("rose" if slope > 0 else "fell") if clear else "unclear"


def differ(share_a: float, n_a: int, share_b: float, n_b: int) -> float:
    """The p-value of Fisher's exact test that two shares of right answers are equal.

    Example: differ(0.5, 100, 0.7, 100) is 0.006
    """
    right_a, right_b = round(share_a * n_a), round(share_b * n_b)
    right, total = right_a + right_b, n_a + n_b

    def log_chance(k: int) -> float:
        return _log_choose(n_a, k) + _log_choose(n_b, right - k) - _log_choose(total, right)

    seen = log_chance(right_a)
    chances = (log_chance(k) for k in range(max(0, right - n_b), min(n_a, right) + 1))
    return min(1.0, sum(math.exp(chance) for chance in chances if chance <= seen + 1e-7))


def differ_paired(only_a: int, only_b: int) -> float:
    """The p-value of McNemar's exact test that two shares of right answers to the same prompts are equal.

    Args:
        only_a, only_b: prompts that are right only in the one, and only in the other.

    Example: differ_paired(1, 8) is 0.039
    """
    n, fewer = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _limit(table: tuple[tuple[int, float], ...], n: int) -> float:
    """The limit for n values, linear in 1/n between the table's entries."""
    place = bisect_left(table, (n, 0.0))
    if place in (0, len(table)):
        return table[min(place, len(table) - 1)][1]
    (n0, low), (n1, high) = table[place - 1 : place + 1]
    share = (1 / n0 - 1 / n) / (1 / n0 - 1 / n1)
    return low + share * (high - low)


def _standard_error(centred: list[float], basis: list[list[float]]) -> float:
    """Of the coefficient of the basis's first vector, with autocorrelated residuals."""
    n, fitted = len(centred), len(basis) + 1
    rest = centred
    for vector in basis:
        weight = _dot(vector, rest)
        rest = [value - weight * v for value, v in zip(rest, vector)]
    squares = _dot(rest, rest)
    if squares == 0:
        return 0.0
    found = sum(a * b for a, b in pairwise(rest)) / squares
    bias = fitted * (1 + 2 * max(found, 0.0)) / n  # each fitted coefficient lowers the autocorrelation that is found
    r = min(0.95, max(0.0, found + bias))
    return math.sqrt(squares / (n - fitted) * (1 + r) / (1 - r))


@functools.cache
def _polynomials(n: int) -> list[list[float]]:
    """Orthonormal polynomials of degrees 1 to 3 over n steps; each also has mean 0."""
    steps = [2 * i / (n - 1) - 1 for i in range(n)]
    basis = [[1 / math.sqrt(n)] * n]
    for degree in (1, 2, 3):
        vector = [step**degree for step in steps]
        for former in basis:
            weight = _dot(former, vector)
            vector = [v - weight * f for v, f in zip(vector, former)]
        size = math.sqrt(_dot(vector, vector))
        basis.append([v / size for v in vector])
    return basis[1:]


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b))
