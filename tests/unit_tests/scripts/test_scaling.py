"""scripts/bench/scaling.py: a step by parts, against what was measured and what real runs send."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from scripts.bench import scaling
from scripts.make_random_checkpoint import qwen3

MEASURED = {"decode": 5.9, "update": 2.35, "push": 0.52}
"""Seconds of docs/measured/gpu.md's step of 0.6B on one H100."""


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


@pytest.mark.parametrize(
    ("size", "tokens", "gpus", "own", "engine", "published"),
    [("8B", 930, (16, 16), 8, 1, 97.7 / 74.6), ("32B", 3076, (32, 64), 32, 4, 393 / 215)],
)
def test_gain_of_generators_one_step_ahead_is_near_that_of_published_steps(size, tokens, gpus, own, engine, published):
    """NeMo RL 0.4 on H100: 2,048 sequences of at most 4,096 tokens, of which the prompts' 130 are a guess. 32B: on twice the GPUs."""
    model = scaling.Model.of(qwen3(size))
    work = scaling.Work(lengths=scaling.draw_lengths(2048, mean=tokens, longest=3966), prompt=130)
    _, parts = scaling.best(work, model, gpus[0], scaling.H100)
    split = scaling.best_split(work, model, gpus[1], scaling.H100, generators=own, engine=engine)
    assert sum(parts.values()) / split.step == pytest.approx(published, rel=0.2)


def test_step_of_a_split_is_the_longer_side_and_the_push_over_the_link():
    model, work = scaling.Model.of(qwen3("0.6B")), scaling.Work(lengths=np.full(512, 256), prompt=64)
    few, many = (scaling.best_split(work, model, 16, scaling.H100, generators=number, engine=1) for number in (1, 15))
    assert [split.sampling > split.update for split in (few, many)] == [True, False]
    assert [split.step - max(split.sampling, split.update) for split in (few, many)] == pytest.approx(
        [0.5, 0.5], abs=0.4
    )
    unlinked = scaling.best_split(work, model, 16, replace(scaling.H100, network=1e15), generators=15, engine=1)
    link = 2 * model.parameters / scaling.H100.network  # one trainer gathers nothing
    assert many.step - unlinked.step == pytest.approx(link, rel=0.1)
    chosen = scaling.best_split(work, model, 16, scaling.H100)
    assert chosen.step <= min(few.step, many.step)


def test_a_chosen_layout_is_the_one_that_is_estimated(monkeypatch, capsys):
    layout = ["--gpus", "8", "--engine", "2", "--fsdp", "4", "--tp", "2", "--generator-ranks", "4"]
    monkeypatch.setattr(sys, "argv", ["scaling", "8B", "--completion-tokens", "64", "--sequences", "64", *layout])
    scaling.main()
    [line] = capsys.readouterr().out.splitlines()[2:]
    assert line.split()[:5] == ["8", "2", "4", "x", "2"]
    assert line.split()[-8:-5] == ["4", "x", "2"]


def test_gain_of_a_split_is_over_the_best_colocated_layout_with_any_engine(monkeypatch, capsys):
    command = ["scaling", "8B", "--completion-tokens", "64", "--longest", "80", "--sequences", "64", "--gpus", "8"]
    lines = {}
    for engine in ("0", "1"):
        monkeypatch.setattr(sys, "argv", [*command, "--engine", engine])
        scaling.main()
        about, _, lines[engine] = capsys.readouterr().out.splitlines()
        assert "at most 80;" in about
    free, slower = (line.split() for line in lines.values())
    assert float(slower[11]) > float(free[11])  # the colocated step, with engines of 1 GPU
    assert float(slower[-2]) == pytest.approx(float(free[11]) / float(slower[-3]), abs=0.05)


def test_lora_fits_where_the_whole_model_does_not_and_computes_no_gradient_of_its_base():
    full, lora = (scaling.Model.of(qwen3("8B"), lora_rank=rank) for rank in (0, 32))
    assert not scaling.layouts(1, full, scaling.H100)
    assert scaling.Layout(gpus=1, shards=1, engine=1) in scaling.layouts(1, lora, scaling.H100)
    work = scaling.Work(lengths=np.full(4096, 512), prompt=64)
    layout = scaling.Layout(gpus=8, shards=8, engine=1)
    whole, adapters = (scaling.step_seconds(work, model, layout, scaling.H100) for model in (full, lora))
    assert adapters["decode"] == whole["decode"]
    assert adapters["update"] == pytest.approx(0.75 * whole["update"], rel=0.02)  # 3 passes of 4, with checkpointing
    assert adapters["checkpoint"] < 0.03 * whole["checkpoint"]
