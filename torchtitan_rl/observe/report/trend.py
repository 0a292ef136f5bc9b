"""Statistical tests behind the verdicts: has a metric changed over a run, and do two shares of right answers differ?"""

import functools
import math
from typing import Literal

import numpy as np

Trend = Literal["rose", "fell", "unclear", "too few"]

MIN_STEPS = 6
"""With fewer values even a straight line may be chance."""
ALPHA = 0.05
"""Share of runs without a change in which a test may find one."""

_CORRELATION = ((6, 0.95), (8, 0.92), (10, 0.895), (12, 0.875), (14, 0.85))
"""(number of values, |correlation with the step| that AR(0.7) noise exceeds in under 5 % of runs)."""
_T = (
    (15, 5.6),
    (20, 4.9),
    (30, 3.85),
    (50, 3.0),
    (100, 2.45),
    (200, 2.2),
    (400, 2.1),
    (10_000, 2.0),
)
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
    basis = _polynomials(n)
    centred = np.array(values) - np.mean(values)  # [n]
    slope = basis[:, 0] @ centred
    total = centred @ centred
    if total <= 1e-18 * n * np.abs(values).max() ** 2:  # constant
        return "unclear"
    if n < _T[0][0]:
        clear = abs(slope) / math.sqrt(total) > _limit(_CORRELATION, n)
    else:
        clear = abs(slope) > _limit(_T, n) * _standard_error(centred, basis)
    return ("rose" if slope > 0 else "fell") if clear else "unclear"


def differ_paired(only_a: int, only_b: int) -> float:
    """The p-value of McNemar's exact test that two shares of right answers to the same prompts are equal.

    Args:
        only_a, only_b: prompts that are right only in the one, and only in the other.

    Example: differ_paired(1, 8) is 0.039
    """
    from scipy.stats import binomtest

    n = only_a + only_b
    return float(binomtest(only_a, n).pvalue) if n else 1.0


def _limit(table: tuple[tuple[int, float], ...], n: int) -> float:
    """The limit for n values, linear in 1/n between the table's entries."""
    numbers, limits = zip(*table)
    return float(np.interp(-1 / n, [-1 / number for number in numbers], limits))


def _standard_error(centred: np.ndarray, basis: np.ndarray) -> float:
    """Of the coefficient of the basis's first column, with autocorrelated residuals.

    Args:
        centred: [n] values with mean 0.
        basis: [n, 3] from `_polynomials`.
    """
    n, fitted = len(centred), basis.shape[1] + 1
    rest = centred - basis @ (basis.T @ centred)  # [n]
    squares = rest @ rest
    if squares == 0:
        return 0.0
    found = rest[:-1] @ rest[1:] / squares
    bias = (
        fitted * (1 + 2 * max(found, 0.0)) / n
    )  # each fitted coefficient lowers the autocorrelation that is found
    r = min(0.95, max(0.0, found + bias))
    return math.sqrt(squares / (n - fitted) * (1 + r) / (1 - r))


@functools.cache
def _polynomials(n: int) -> np.ndarray:
    """Orthonormal polynomials of degrees 1 to 3 over n steps, [n, 3]; each also has mean 0. The first one rises."""
    steps = np.linspace(-1, 1, n)
    basis, _ = np.linalg.qr(np.vander(steps, 4, increasing=True))  # [n, 4]
    return basis[:, 1:] * np.sign(basis[-1, 1])
