"""scripts/bench/scaling.py: a step by parts, against what was measured and what real runs send."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import scaling
from torchtitan_rl.library.models import qwen3

ROOT = Path(__file__).resolve().parents[3]

MEASURED = {"decode": 5.9, "update": 2.35, "push": 0.52}
"""Seconds of docs/gpu.md's step of 0.6B on one H100."""


def recorded_step() -> scaling.Work:
    """256 sequences of 64 + 512 tokens; equal rewards, so a forward alone; the head's tiles of that day."""
    lengths = np.full(256, 512)
    return scaling.Work(lengths=lengths, prompt=64, forward_operators=25_400, backward=False)


def test_parts_of_the_recorded_h100_step_are_within_15_percent():
    model, layout = scaling.Model.of(qwen3("0.6B")), scaling.Layout(gpus=1, shards=1, engine=1)
    found = scaling.step_seconds(recorded_step(), model, layout, scaling.H100)
    assert {name: found[name] for name in MEASURED} == pytest.approx(MEASURED, rel=0.15)
    assert sum(found[name] for name in MEASURED) == pytest.approx(8.9, rel=0.15)


def test_curve_names_the_best_layout_of_each_number_of_gpus(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "8B", "--completion-tokens", "64", "--sequences", "64"])
    scaling.main()
    lines = capsys.readouterr().out.splitlines()
    assert "does not fit" in lines[2]
    assert [line.split()[0] for line in lines[2:]] == [str(2**power) for power in range(11)]


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
