"""Loading a run: whatever is missing, torn or there twice costs a note, never the report."""

from tests.parts.report_runs import write_run
from torchtitan_rl.observe.report import load_run
from torchtitan_rl.observe.report.overview import ending


def test_incomplete_and_invalid_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write('[1, 2]\nnot json\n{"step": "three"}\n{"step": 4, "reward/me')
    run = load_run(folder)
    assert run.steps == [0, 1, 2, 3]
    assert len(run.rows) == 3 * 16


def test_run_without_a_recorded_end_says_how_far_it_has_come(tmp_path):
    folder = write_run(tmp_path / "a", steps=7, num_steps=50)
    said = ending(load_run(folder))["text"]
    assert said.startswith("7 of 50 steps in 0:00:14, the last at 2023")
    assert "no end is recorded" in said
