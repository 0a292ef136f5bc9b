"""scripts/results.py: its cells are sound configs, a run that is done is not repeated, and its table is right."""

import json
import subprocess
import sys

import numpy as np
import pytest

from scripts import results
from tests.parts.report_runs import write_run
from torchtitan_rl.command.registry import load_config, parse_args
from torchtitan_rl.validation import validate


@pytest.mark.parametrize("cell", results.cells())
def test_every_cell_is_a_sound_config(cell, tmp_path):
    name, config = parse_args(results.arguments(cell, 3, tmp_path / "run", 4))
    validate(config, world_size=results.RANKS.get(cell, 1))
    config.task.build().held_out_examples(config.evaluation.num_prompts)
    assert (config.seed, config.num_steps, config.dump_folder) == (3, 4, str(tmp_path / "run"))
    assert load_config(name).num_steps == 20


def written(folder, accuracies, seed=0):
    """A run that is done, with these held-out accuracies at steps 0, 5, ..."""
    write_run(folder, steps=5 * (len(accuracies) - 1), seed=seed)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("evaluation/accuracy", None)
        line["completions/tokens"] = 1500 if line["step"] else 0
        if line["step"] % 5 == 0:
            line["evaluation/accuracy"] = accuracies[line["step"] // 5]
            line["time/evaluate"] = 7.0
            line["time/step"] = line.get("time/step", 0.0) + 7.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "end.json").write_text(json.dumps({"outcome": "done"}))


def test_table_has_means_intervals_and_the_detectable_difference(tmp_path, monkeypatch, capsys):
    for seed, last in enumerate((0.42, 0.44, 0.46)):
        written(tmp_path / "grpo" / f"seed-{seed}", [0.1, 0.2, last], seed)
        written(tmp_path / "dapo" / f"seed-{seed}", [0.1, 0.3, last - 0.1], seed)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a run that is done was repeated"))
    options = ["--only", "grpo", "dapo", "--seeds", "3", "--target", "0.4", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["results.py", *options])
    assert results.main() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")]
    assert cells[1:5] == ["grpo", "3", "44.0 ± 5.0", "10.0 ± 0.0"]  # t(2) 4.303 * 2 / sqrt(3)
    assert cells[5:7] == ["15.0 ± 0.0", "20"]  # 10 steps of 1,500 tokens
    assert "not reached" in lines[3]
    freedom, spread = 4, 0.02
    least = (2.7764 + 0.9410) * spread * np.sqrt(2 / 3)
    assert f"less than {100 * least:.1f} points" in lines[-2], freedom
    # t = 0.1 / (0.02 sqrt(2 / 3)) with 4 degrees of freedom
    assert lines[-1] == "Of other accuracy than grpo (Welch's t, p corrected by Holm): dapo 0.004."
