"""Loading a run: whatever is missing, torn or there twice costs a note, never the report."""

import fcntl
import json
import os

import pytest

from tests.parts.report_runs import write_run
from torchtitan_rl.report import load as loading
from torchtitan_rl.report import load_run
from torchtitan_rl.report.ending import ending


def test_metrics_come_as_series_with_gaps_where_a_step_has_no_value(tmp_path):
    run = load_run(write_run(tmp_path / "a", steps=8))
    assert run.steps == list(range(9))
    assert run.points("evaluation/accuracy") == ([0, 4, 8], [0.25, 0.5, 0.75])
    assert run.series["reward/mean"][0] is None
    assert (run.total_steps, run.finished) == (8, True)


def test_incomplete_and_invalid_lines_are_skipped_and_counted(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write('[1, 2]\nnot json\n{"step": "three"}\n{"step": 4, "reward/me')
    run = load_run(folder)
    assert run.steps == [0, 1, 2, 3]
    assert len(run.rows) == 3 * 16
    assert [note for note in run.notes if "4 lines could not be read" in note] == run.notes


@pytest.mark.parametrize("missing", ["config.json", "environment.json", "samples.jsonl", "metrics.jsonl"])
def test_missing_file_gives_a_note(tmp_path, missing):
    folder = write_run(tmp_path / "a", steps=2)
    (folder / missing).unlink()
    assert missing in " ".join(load_run(folder).notes)


def test_of_a_large_store_the_selected_rows_and_the_greedy_evaluations_are_read(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", steps=20, prompts=8)
    held_out = {
        "step": 9,
        "split": "eval_greedy",
        "prompt_idx": 3,
        "select_reason": "",
        "episode_id": "eval_greedy/9/3/0",
    }
    with open(folder / "samples.jsonl", "a") as file:
        file.write(json.dumps(held_out) + "\n")
    monkeypatch.setattr(loading, "READ_BYTES", (folder / "samples.jsonl").stat().st_size // 4)
    run = load_run(folder)
    assert run.num_stored_rows == 641
    assert [bool(row["select_reason"]) for row in run.rows] == [True] * 20 + [False]
    assert "21 of its 641 rows were read" in " ".join(run.notes)


def test_run_counts_as_running_while_locked_or_recently_changed(tmp_path):
    folder = write_run(tmp_path / "a", steps=7, num_steps=50)
    assert ending(load_run(folder))["text"].startswith("Running: step 7 of 50, about 1 min 26 s left, the last at 2023")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1e9, 1e9))
    assert "its end is not recorded" in ending(load_run(folder))["text"]
    with open(folder / "run.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load_run(folder).running
    assert not load_run(folder).running
    (folder / "config.json").write_text('{"num_steps": 7}')
    assert ending(load_run(folder))["text"].startswith("7 steps")
