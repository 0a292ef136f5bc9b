"""The picture of several runs: runs that differ only in their seed become one curve with an interval."""

import json

import pytest
from scipy import stats

from scripts import plot_run
from tests.parts.report_runs import write_run


def test_seeds_become_a_mean_with_a_t_interval_and_other_settings_a_curve_of_their_own(tmp_path):
    seeds = [write_run(tmp_path / f"seed_{seed}", steps=8, seed=seed) for seed in range(3)]
    other = write_run(tmp_path / "other", steps=8, seed=0, algorithm={"kl": {"coef": 0.01}})
    groups = plot_run.by_config([*seeds, other])
    assert groups == {"seed_0 and 2 more": seeds, "other": [other]}
    steps, means, half = plot_run.mean_over_runs(seeds, "reward/mean")
    values = [
        [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
        for run in seeds
    ]
    assert steps == list(range(1, 9))
    for place, step_values in enumerate(zip(*values)):
        low, high = stats.t.interval(0.95, 2, loc=sum(step_values) / 3, scale=stats.sem(step_values))
        assert means[place] - half[place] == pytest.approx(low)
        assert means[place] + half[place] == pytest.approx(high)
