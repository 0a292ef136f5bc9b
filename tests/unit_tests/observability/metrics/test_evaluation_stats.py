"""pass@k and the intervals, against what they estimate and against scipy."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from torchtitan_rl.observability.metrics.evaluation_stats import interval, pass_at


@pytest.mark.parametrize(("n", "c"), [(1, 0), (4, 1), (6, 3), (8, 8)])
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_right_one(n, c):
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        draws = [any(draw) for draw in combinations(right, k)]
        assert pass_at(k, n, c) == pytest.approx(sum(draws) / len(draws))


def test_intervals_are_those_of_scipys_percentile_bootstrap():
    values = np.random.default_rng(1).random(200) < 0.3
    ours = interval(values, resamples=5000)
    scipys = stats.bootstrap((values,), np.mean, n_resamples=5000, method="percentile", rng=2).confidence_interval
    assert ours == pytest.approx((scipys.low, scipys.high), abs=0.01)
    assert interval(values) == interval(values)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_where_all_or_none_are_right_the_interval_is_wilsons(share):
    wilson = stats.binomtest(int(40 * share), 40).proportion_ci(method="wilson")
    assert interval([share] * 40) == pytest.approx((wilson.low, wilson.high), abs=1e-5)
