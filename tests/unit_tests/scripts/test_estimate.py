"""torchtitan-rl estimate: its numbers are those of the efficiency metrics."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import scaling
from torchtitan_rl.library.models import qwen3
from torchtitan_rl.setup import estimate, offline

ROOT = Path(__file__).resolve().parents[3]


def test_a_configs_step_is_estimated_without_starting_it(monkeypatch, capsys):
    options = ["--config", "debug", "--gpus", "1", "--gpu", "H100", "--prompt-tokens", "56", "--completion-tokens", "8"]
    offline.main(["estimate", *options])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"decode", "train", "sync", "step", "memory"} <= lines.keys()


def estimated(monkeypatch, capsys, *options) -> dict[str, str]:
    """The lines of an estimate by their first word."""
    offline.main(["estimate", *options])
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def test_demonstrations_cost_an_update_alone(monkeypatch, capsys):
    lines = estimated(monkeypatch, capsys, "--config", "sft", "--model", "0.6B")
    assert {"train", "step", "run", "memory"} <= lines.keys()
    assert not {"decode", "sync", "teacher"} & lines.keys()


def test_a_larger_teacher_costs_more_time_and_memory(monkeypatch, capsys, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(
        "from configs.qwen3 import qwen3_0_6b\nfrom torchtitan_rl.core.algorithm import Algorithm\n"
        "from torchtitan_rl.library.distillation import ExactDistill\n"
        "def distilled():\n    config = qwen3_0_6b()\n"
        "    config.algorithm = Algorithm.Config(loss=ExactDistill.Config())\n    return config\n"
    )
    small, large = (
        estimated(monkeypatch, capsys, "--config", f"{config}:distilled", "--teacher", size) for size in ("1.7B", "8B")
    )
    assert float(small["teacher"].split()[1]) < float(large["teacher"].split()[1])
    assert float(small["memory"].split()[1]) + 5 < float(large["memory"].split()[1])
    with pytest.raises(SystemExit):
        estimated(monkeypatch, capsys, "--config", f"{config}:distilled")
    assert "learns from a teacher: name its folder" in capsys.readouterr().err


def test_the_head_is_charged_for_completion_tokens_only(monkeypatch):
    found = {}
    bounds = {"decode": 1.0, "train": 1.0, "sync": 1.0}
    monkeypatch.setattr(estimate, "bound_seconds", lambda lengths, **how: found.update(how) or bounds)
    options = ["--config", "debug", "--gpu", "H100", "--prompt-tokens", "56", "--completion-tokens", "8"]
    offline.main(["estimate", *options])
    (tokens, attended, scored), backward = found["work"]
    assert backward == [tokens, attended, scored]
    assert scored / tokens == 8 / 64
    assert attended / tokens == 65 / 2


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


def recorded_step() -> scaling.Work:
    """256 sequences of 64 + 512 tokens; equal rewards, so a forward alone; the head's tiles of that day."""
    lengths = np.full(256, 512)
    return scaling.Work(lengths=lengths, prompt=64, forward_operators=25_400, backward=False)


def test_parts_of_the_recorded_h100_step_are_within_15_percent():
    model, layout = scaling.Model.of(qwen3("0.6B")), scaling.Layout(gpus=1, shards=1, engine=1)
    found = scaling.step_seconds(recorded_step(), model, layout, scaling.H100)
    assert {name: found[name] for name in MEASURED} == pytest.approx(MEASURED, rel=0.15)
    assert sum(found[name] for name in MEASURED) == pytest.approx(8.9, rel=0.15)


def test_more_gpus_shorten_the_step_and_cost_tokens_per_gpu():
    model = scaling.Model.of(qwen3("8B"))
    work = scaling.Work(lengths=scaling.draw_lengths(512, mean=512, longest=2048), prompt=128)
    steps = [sum(scaling.best(work, model, gpus, scaling.H100)[1].values()) for gpus in (4, 8, 32)]
    assert steps[0] > steps[1] > steps[2]
    assert 4 * steps[0] < 8 * steps[1] < 32 * steps[2]
    assert scaling.best(work, model, 1, scaling.H100) is None


def test_equal_lengths_have_no_straggler():
    model, layout = scaling.Model.of(qwen3("0.6B")), scaling.Layout(gpus=8, shards=1, engine=1)
    for spread, waits in ((0.0, False), (0.8, True)):
        lengths = scaling.draw_lengths(64, mean=256, longest=1024, spread=spread)
        found = scaling.step_seconds(scaling.Work(lengths=lengths, prompt=64), model, layout, scaling.H100)
        assert (found["straggler"] > 0) == waits


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
