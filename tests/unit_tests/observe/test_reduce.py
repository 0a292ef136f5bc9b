"""Reductions: what each computes, and that ranks merge states."""

import math
import pickle
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.observe.reduce import MAX_SAMPLE, Distribution, Reduce, Series

numbers = st.floats(-1e6, 1e6, allow_nan=False)


def series(reduction, pairs=()):
    """A series that was given these (value, weight) pairs."""
    one = (Distribution if reduction is Reduce.DISTRIBUTION else Series)(reduction)
    for value, weight in pairs:
        one.append(np.array([value]) if reduction is Reduce.DISTRIBUTION else value, weight)
    return one


def reduced(reduction, *ranks):
    """The value that ranks with these (value, weight) pairs merge to, as they reach rank 0; a distribution's median."""
    first, *others = (pickle.loads(pickle.dumps(series(reduction, pairs))) for pairs in ranks)
    for other in others:
        first.merge(other)
    return first.values("x").get("x/p50" if reduction is Reduce.DISTRIBUTION else "x")


def once(values):
    return [(value, 1.0) for value in values]


def test_std_of_large_close_numbers_is_stable_in_any_split_over_ranks():
    values = once([1e8, 1e8 + 1, 1e8 + 2])
    for ranks in ([values], [values[:1], values[1:]], [values, []]):
        assert reduced(Reduce.STD, *ranks) == pytest.approx(math.sqrt(2 / 3), abs=1e-9)


def test_last_of_several_ranks_is_the_lowest_rank_s_latest():
    assert reduced(Reduce.LAST, [], once([3, 4]), once([9])) == 4


def test_mean_is_weighted():
    assert reduced(Reduce.MEAN, [(2.0, 3.0), (6.0, 1.0)]) == 3.0


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
        (Reduce.DISTRIBUTION, lambda v: float(np.quantile(v, 0.5))),
    ):
        value = reduced(reduction, *map(once, ranks))
        if pooled:
            assert value == pytest.approx(expected(pooled), rel=1e-9, abs=1e-5)
        else:
            assert value is None


def distribution(*arrays):
    one = series(Reduce.DISTRIBUTION)
    for values in arrays:
        one.append(np.asarray(values, dtype=float))
    return one


def test_a_distribution_is_exact_up_to_its_cap_and_a_repeatable_sample_of_bounded_size_above_it():
    values = np.arange(MAX_SAMPLE, dtype=float)
    assert sorted(distribution(*np.split(values, 8)).numbers) == values.tolist()
    many = np.split(np.arange(50.0 * MAX_SAMPLE), 100)
    sample, again = distribution(*many).numbers, distribution(*many).numbers
    assert len(sample) == len(set(sample)) == MAX_SAMPLE
    assert np.array_equal(sample, again)


def test_a_sampled_distribution_of_uneven_ranks_is_that_of_the_pooled_values():
    small, large = distribution(np.zeros(MAX_SAMPLE * 2)), distribution(*np.ones((60, MAX_SAMPLE // 10)))
    small.merge(large)
    share = 6 / (6 + 2)
    assert small.numbers.mean() == pytest.approx(share, abs=0.02), "large is three quarters of all values"
