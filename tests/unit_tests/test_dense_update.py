"""Whole updates of random settings against an independent dense reference, in float64: the loss and the gradient of each.

A case, by its number, draws the objective (loss, advantages, credit, aggregation, correction, KL, entropy, truncation, zero variance,
SEED-GRPO, MaxEnt), the groups (rewards, turns, masks, lengths) and the layout (ranks, micro-batches, shared prompts, padding,
mini-batches). The project's side is the trainer's own planning, packing and head and `Algorithm`.
"""

from collections import Counter

import pytest

from tests.parts.random_update import BOUND, differences, random_case

CASES = 200
CHOICES = {
    "loss": 9, "around": 4, "advantage": 5, "credit": 2, "aggregation": 3, "mismatch": 5, "kl": 3, "kl_place": 3, "truncation": 3,
}  # fmt: skip


@pytest.mark.parametrize("cases", [range(CASES), pytest.param(range(CASES, 6000), marks=pytest.mark.long)])
def test_update_loss_and_gradient_equal_the_dense_reference(cases):
    found = {case: differences(case) for case in cases}
    assert {case: pairs for case, pairs in found.items() if max((max(p) for p in pairs or ()), default=0) > BOUND} == {}
    compared = sum(bool(pairs) for pairs in found.values())
    assert compared > 0.7 * len(found)  # the others learn nothing, or are too close to a bound of a clip or mask


def test_random_cases_cover_every_option():
    settings = [random_case(case)[0]["settings"] for case in range(CASES)]
    for name, number in CHOICES.items():
        drawn = Counter(case[name] for case in settings)
        assert len(drawn) == number, name
        assert min(drawn.values()) >= 8, name
