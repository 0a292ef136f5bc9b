"""MaxEnt-GRPO's target distribution: closed forms and limits."""

import math

import pytest

from torchtitan_rl.algorithm.losses.maxent.weights import entropy, listwise_weights, reward_distribution

E = math.e


@pytest.mark.parametrize(
    ("rewards", "temperature", "floor", "expected"),
    [
        ([1.0, 0.0], 1.0, 0.0, [E / (E + 1), 1 / (E + 1)]),
        ([1.0, 0.0], 0.5, 0.0, [E**2 / (E**2 + 1), 1 / (E**2 + 1)]),
        # p = (1, 0) in the limit of temperature 0: q = (1 - 2 eps + eps, eps)
        ([1.0, 0.0], 0.0, 0.01, [0.99, 0.01]),
        ([2.0, 2.0, 2.0, 2.0], 1.0, 1e-6, [0.25] * 4),
        # 3 completions, floor 0.1: 0.7 p + 0.1
        ([math.log(2), 0.0, 0.0], 1.0, 0.1, [0.45, 0.275, 0.275]),
    ],
)
def test_reward_distribution_equals_its_closed_form(rewards, temperature, floor, expected):
    assert reward_distribution(rewards, temperature, floor) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("q", "reference", "tau", "beta", "expected"),
    [
        ([0.8, 0.2], None, 1.0, 0.0, [0.8, 0.2]),
        ([0.8, 0.2], None, 0.5, 0.0, [16 / 17, 1 / 17]),
        ([0.8, 0.2], None, 2.0, 0.0, [2 / 3, 1 / 3]),
        # log q + beta l: 0.8 e^0, 0.2 e^{ln 4} -> equal
        ([0.8, 0.2], [0.0, math.log(4)], 1.0, 1.0, [0.5, 0.5]),
        # beta / tau = 2 on the reference, 1 / tau = 2 on q: 0.64 and 0.04 * 16
        ([0.8, 0.2], [0.0, math.log(4)], 0.5, 1.0, [0.5, 0.5]),
        ([0.8, 0.2], [0.0, math.log(16)], 1.0, 0.5, [0.5, 0.5]),
        # a floor of 0 and a mass of 0
        ([1.0, 0.0], None, 1.0, 0.0, [1.0, 0.0]),
    ],
)
def test_listwise_weights_equal_their_closed_form(q, reference, tau, beta, expected):
    assert listwise_weights(q, reference, tau, beta) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 0.0], 0.0), ([0.25] * 4, math.log(4)), ([0.5, 0.25, 0.25], 1.5 * math.log(2))]
)
def test_entropy_of_weights(weights, expected):
    assert entropy(weights) == pytest.approx(expected, abs=1e-12)
