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


def test_shares_of_prompts_have_the_intervals_of_scipys_percentile_bootstrap():
    values = np.random.default_rng(1).binomial(4, 0.3, 200) / 4  # 4 samples for each prompt
    ours = interval(values, resamples=5000)
    scipys = stats.bootstrap((values,), np.mean, n_resamples=5000, method="percentile", rng=2).confidence_interval
    assert ours == pytest.approx((scipys.low, scipys.high), abs=0.01)
    assert interval(values) == interval(values)


@pytest.mark.parametrize("right", [0, 1, 17, 40])
def test_right_or_wrong_has_wilsons_interval(right):
    wilson = stats.binomtest(right, 40).proportion_ci(method="wilson")
    assert interval([True] * right + [False] * (40 - right)) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


def test_the_interval_covers_a_rare_success_about_as_often_as_it_says():
    """Over the binomial distribution of the right answers among 256 prompts, each right with chance 0.02."""
    num, chance = 256, 0.02
    counts = np.arange(30)
    ends = [interval([1.0] * count + [0.0] * (num - count)) for count in counts]
    covered = sum(stats.binom.pmf(c, num, chance) for c, (low, high) in zip(counts, ends) if low <= chance <= high)
    assert 0.94 < covered < 0.98  # the percentile bootstrap: 0.89
