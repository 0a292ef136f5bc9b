"""Reductions: what each computes, and that ranks merge states."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.observability.reduce import ACCUMULATORS, Reduce

SCALARS = list(ACCUMULATORS)
numbers = st.floats(-1e6, 1e6, allow_nan=False)


def reduced(reduction, *ranks):
    """The value that ranks with these (value, weight) pairs merge to."""
    accumulators = []
    for pairs in ranks:
        accumulator = ACCUMULATORS[reduction]()
        for value, weight in pairs:
            accumulator.append(value, weight)
        accumulators.append(accumulator)
    for other in accumulators[1:]:
        accumulators[0].merge(other.get_state())
    return accumulators[0].get_value()


def once(values):
    return [(value, 1.0) for value in values]


def test_mean_of_two_ranks_is_the_pooled_mean_0_75_not_the_mean_of_means():
    assert reduced(Reduce.MEAN, once([1, 1, 1]), once([0])) == 0.75


def test_mean_is_weighted_by_what_each_value_stands_for():
    assert reduced(Reduce.MEAN, [(2.0, 3.0), (6.0, 1.0)]) == 3.0


def test_std_of_large_close_numbers_is_0_816_in_any_split_over_ranks():
    values = [1e8, 1e8 + 1, 1e8 + 2]
    expected = math.sqrt(2 / 3)
    assert reduced(Reduce.STD, once(values)) == pytest.approx(expected, abs=1e-9)
    assert reduced(Reduce.STD, once(values[:1]), once(values[1:])) == pytest.approx(expected, abs=1e-9)
    assert reduced(Reduce.STD, once(values), []) == pytest.approx(expected, abs=1e-9)


def test_last_of_several_ranks_is_the_lowest_rank_s_latest():
    assert reduced(Reduce.LAST, [], once([3, 4]), once([9])) == 4


@pytest.mark.parametrize("reduction", SCALARS)
def test_empty_has_no_value_and_reset_empties(reduction):
    accumulator = ACCUMULATORS[reduction]()
    assert accumulator.get_value() is None
    accumulator.append(1.0, 1.0)
    assert accumulator.get_value() is not None
    accumulator.reset()
    assert accumulator.get_value() is None


@settings(max_examples=60, deadline=None)
@given(ranks=st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=4))
def test_merged_states_equal_the_pooled_values_for_every_reduction(ranks):
    pooled = [value for values in ranks for value in values]
    for reduction, expected in (
        (Reduce.SUM, sum),
        (Reduce.MAX, max),
        (Reduce.MIN, min),
        (Reduce.MEAN, statistics.fmean),
        (Reduce.STD, statistics.pstdev),
        (Reduce.QUANTILES, lambda v: float(np.quantile(v, 0.5))),
    ):
        value = reduced(reduction, *map(once, ranks))
        if not pooled:
            assert value is None
            continue
        if reduction is Reduce.QUANTILES:
            value = value["p50"]
        assert value == pytest.approx(expected(pooled), rel=1e-9, abs=1e-5)


def test_states_share_nothing_with_their_accumulator():
    accumulator = ACCUMULATORS[Reduce.QUANTILES]()
    accumulator.append(1.0, 1.0)
    state = accumulator.get_state()
    accumulator.append(2.0, 1.0)
    assert list(state) == [1.0]


def test_reduce_is_named_by_its_string_too():
    assert Reduce("quantiles") is Reduce.QUANTILES
