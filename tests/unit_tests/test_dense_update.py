"""Whole updates of random settings against an independent dense reference. `tests.integration.dense` runs thousands."""

from collections import Counter

import pytest

from tests.parts.random_update import BOUND, differences, random_case

CASES, BATCHES = 200, 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_update_loss_and_gradient_equal_the_dense_reference(batch):
    found = {seed: differences(seed) for seed in range(batch, CASES, BATCHES)}
    wrong = {
        seed: pairs for seed, pairs in found.items() if max((max(pair) for pair in pairs or ()), default=0) > BOUND
    }
    assert wrong == {}
    compared = sum(bool(pairs) for pairs in found.values())
    assert compared > 0.7 * len(found)  # the others learn nothing, or are too close to a bound of a clip or mask


def test_random_cases_cover_every_option():
    drawn = Counter()
    for seed in range(CASES):
        case, _, _ = random_case(seed)
        drawn.update((name, str(value)) for name, value in case["settings"].items())
    choices = {
        "loss": 9,
        "around": 6,
        "advantage": 6,
        "credit": 2,
        "aggregation": 3,
        "mismatch": 5,
        "kl": 3,
        "kl_place": 3,
        "truncation": 3,
    }
    for name, number in choices.items():
        counts = [count for (setting, _), count in drawn.items() if setting == name]
        assert len(counts) == number, name
        assert min(counts) >= 8, name
