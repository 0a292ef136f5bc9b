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


def test_an_output_without_an_ending_is_a_png_that_is_named_and_overwrites_no_other_file(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", steps=3)
    monkeypatch.setattr("sys.argv", ["plot_run", str(run), "--output", str(tmp_path / "curve")])
    plot_run.main()
    assert capsys.readouterr().out == f"{tmp_path / 'curve.png'}\n"
    (tmp_path / "curve.png").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        plot_run.main()
    assert (tmp_path / "curve.png").read_text() == "mine"
