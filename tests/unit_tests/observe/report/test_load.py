"""Loading a run: whatever is missing, torn or there twice costs a note, never the report."""

import pytest

from tests.parts.report_runs import write_run
from torchtitan_rl.observe.report import load_run
from torchtitan_rl.observe.report.overview import ending


def test_metrics_come_as_series_with_gaps_where_a_step_has_no_value(tmp_path):
    run = load_run(write_run(tmp_path / "a", steps=8))
    assert run.steps == list(range(9))
    assert run.points("evaluation/accuracy") == ([0, 4, 8], [0.25, 0.5, 0.75])
    assert run.series["reward/mean"][0] is None


def test_incomplete_and_invalid_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write('[1, 2]\nnot json\n{"step": "three"}\n{"step": 4, "reward/me')
    run = load_run(folder)
    assert run.steps == [0, 1, 2, 3]
    assert len(run.rows) == 3 * 16


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "samples.jsonl", "metrics.jsonl"])
def test_missing_file_gives_a_note(tmp_path, missing):
    folder = write_run(tmp_path / "a", steps=2)
    (folder / missing).unlink()
    assert missing in " ".join(load_run(folder).notes)


def test_run_without_a_recorded_end_says_how_far_it_has_come(tmp_path):
    folder = write_run(tmp_path / "a", steps=7, num_steps=50)
    said = ending(load_run(folder))["text"]
    assert said.startswith("7 of 50 steps in 0:00:14, the last at 2023")
    assert "no end is recorded" in said
