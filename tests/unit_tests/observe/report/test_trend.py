"""The tests behind the verdicts keep their error rate on simulated noise, and still see what a run learns."""

import math
import random

import pytest

from torchtitan_rl.observe.report.trend import differ_paired, trend

RUNS = 800
BY_CHANCE = 0.067
"""5 %, and two standard errors of RUNS simulated runs."""


def noise(steps: int, autocorrelation: float, chance: random.Random) -> list[float]:
    """AR(1) noise with variance 1."""
    value, values = chance.gauss(0, 1), []
    for _ in range(steps):
        values.append(value)
        value = autocorrelation * value + math.sqrt(1 - autocorrelation**2) * chance.gauss(0, 1)
    return values


@pytest.mark.parametrize("autocorrelation", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("steps", [2, 3, 6, 9, 14, 15, 20, 30, 60])
def test_noise_rises_or_falls_in_at_most_5_percent_of_runs(steps, autocorrelation):
    chance = random.Random(steps)
    found = [trend(noise(steps, autocorrelation, chance)) for _ in range(RUNS)]
    assert sum(one in ("rose", "fell") for one in found) / RUNS <= BY_CHANCE


SHAPES = {
    "straight": lambda x: x,
    "levels off": lambda x: 1 - math.exp(-6 * x),
    "in the middle": lambda x: 1 / (1 + math.exp(-12 * (x - 0.5))),
}


@pytest.mark.parametrize("steps", [30, 50, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_learning_curve_gives_a_rising_trend(shape, steps):
    chance = random.Random(0)
    curves = [
        [0.2 * value + SHAPES[shape](i / (steps - 1)) for i, value in enumerate(noise(steps, 0.3, chance))]
        for _ in range(100)
    ]
    assert sum(trend(curve) == "rose" for curve in curves) >= 65
    assert sum(trend([-value for value in curve]) == "fell" for curve in curves) >= 65


def test_mcnemar_s_exact_test_is_the_textbook_s():
    # scipy.stats.binomtest(1, 9).pvalue, (5, 20) and (0, 8)
    assert differ_paired(1, 8) == pytest.approx(0.0390625)
    assert differ_paired(15, 5) == pytest.approx(0.04138947)
    assert differ_paired(0, 8) == pytest.approx(0.0078125)
    assert differ_paired(0, 0) == differ_paired(4, 4) == 1.0
    assert differ_paired(3000, 0) < 1e-300
