"""torchtitan-rl estimate: its numbers are those of the efficiency metrics."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from torchtitan_rl.library.models import qwen3
from torchtitan_rl.setup import offline, step_model

ROOT = Path(__file__).resolve().parents[3]


def test_a_configs_step_is_estimated_without_starting_it(monkeypatch, capsys):
    options = ["--config", "debug", "--gpus", "1", "--gpu", "H100", "--prompt-tokens", "56", "--completion-tokens", "8"]
    offline.main(["estimate", *options])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"decode", "train", "sync", "step", "memory"} <= lines.keys()


def test_the_gain_of_groups_in_flight_follows_from_a_runs_lengths(monkeypatch, capsys, tmp_path):
    lengths = {"min": 10, "p25": 20, "p50": 30, "p75": 60, "p95": 200, "max": 400}
    step = {f"completions/group_longest/{name}": tokens for name, tokens in lengths.items()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 1, **step}) + "\n")
    options = ["--config", "debug", "--gpu", "H100", "--run", str(tmp_path)]
    offline.main(["estimate", *options])
    gains = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.endswith(" x")]
    assert len(gains) == 3
    assert 1 < gains[0] < gains[1] < gains[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--config", "debgu"], "--config = 'debgu': expected a registered name"),
        (["--config", "sums"], "--config sums reads its model from a folder"),
        (["--config", "sums", "--model", "Qwen/Qwen3-8B"], "model_spec = 'Qwen/Qwen3-8B': expected a size of Qwen3"),
        (["--config", "debug", "--gpus", "0"], "--gpus 0: expected a number above 0"),
        (["--config", "debug", "--sync-share", "nan"], "--sync-share nan: expected a number above 0"),
        (["--config", "debug", "--train-share", "2"], "--train-share 2.0: expected a number above 0 and at most 1"),
        (["--config", "debug", "--teacher", "8B"], "--teacher 8B: --config debug learns from none, leave it out"),
        (["--config", "debug", "--run", "nowhere"], "--run = 'nowhere': expected a run with training steps, but"),
        (
            ["--config", "qwen3_8b", "--gpus", "3"],
            "generator.tensor_parallel_degree = 2: expected a divisor of the 3 ranks. Change it, or --gpus.",
        ),
        (
            ["--config", "debug", "--prompt-tokens", "999"],
            "--prompt-tokens 999 and --completion-tokens 32: expected at most 512",
        ),
    ],
)
def test_each_wrong_option_is_one_sentence(monkeypatch, capsys, options, says):
    with pytest.raises(SystemExit, match="2"):
        offline.main(["estimate", *options])
    assert f"error: {says}" in capsys.readouterr().err


MEASURED = {"decode": 5.9, "update": 2.35, "push": 0.52}
"""Seconds of docs/gpu.md's step of 0.6B on one H100."""


def recorded_step() -> step_model.Work:
    """256 sequences of 64 + 512 tokens; equal rewards, so a forward alone; the head's tiles of that day."""
    lengths = np.full(256, 512)
    return step_model.Work(lengths=lengths, prompt=64, forward_operators=25_400, backward=False)


def test_parts_of_the_recorded_h100_step_are_within_15_percent():
    model, layout = step_model.Model.of(qwen3("0.6B")), step_model.Layout(gpus=1, shards=1, engine=1)
    found = step_model.step_seconds(recorded_step(), model, layout, step_model.H100)
    assert {name: found[name] for name in MEASURED} == pytest.approx(MEASURED, rel=0.15)
    assert sum(found[name] for name in MEASURED) == pytest.approx(8.9, rel=0.15)


def test_curve_names_the_best_layout_of_each_number_of_gpus(monkeypatch, capsys):
    options = ["--config", "qwen3_8b", "--curve", "--completion-tokens", "64", "--sequences", "64"]
    offline.main(["estimate", *options])
    lines = capsys.readouterr().out.splitlines()
    assert "does not fit" in lines[2]
    assert [line.split()[0] for line in lines[2:]] == [str(2**power) for power in range(11)]
    with pytest.raises(SystemExit):
        offline.main(["estimate", *options, "--gpus", "8"])
    assert "--curve has the numbers of H100 from 1 to 1,024: leave out --gpus" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"), [(2, ["--max-tokens", "60"]), (4, []), (4, ["--replicate", "2", "--max-tokens", "40"])]
)
def test_collectives_of_real_runs_are_those_of_the_model(ranks, options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    script = ROOT / "tests" / "integration" / "collectives.py"
    result = subprocess.run([*torchrun, script, *options], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "update  all_gather" in result.stdout
