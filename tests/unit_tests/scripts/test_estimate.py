"""scripts/estimate.py: its numbers are those of the efficiency metrics."""

import json
import sys

import pytest

from scripts import estimate


def test_a_configs_step_is_estimated_without_starting_it(monkeypatch, capsys):
    options = ["--config", "debug", "--gpus", "1", "--gpu", "H100", "--prompt-tokens", "56", "--completion-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["estimate.py", *options])
    estimate.main()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"decode", "train", "sync", "step", "memory"} <= lines.keys()


def test_the_head_is_charged_for_completion_tokens_only(monkeypatch):
    found = {}
    bounds = {"decode": 1.0, "train": 1.0, "sync": 1.0}
    monkeypatch.setattr(estimate, "bound_seconds", lambda lengths, **how: found.update(how) or bounds)
    options = ["--config", "debug", "--gpu", "H100", "--prompt-tokens", "56", "--completion-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["estimate.py", *options])
    estimate.main()
    (tokens, attended, scored), backward = found["work"]
    assert backward == [tokens, attended, scored]
    assert scored / tokens == 8 / 64
    assert attended / tokens == 65 / 2


def test_the_gain_of_groups_in_flight_follows_from_a_runs_lengths(monkeypatch, capsys, tmp_path):
    lengths = {"min": 10, "p25": 20, "p50": 30, "p75": 60, "p95": 200, "max": 400}
    step = {f"completions/group_longest/{name}": tokens for name, tokens in lengths.items()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 1, **step}) + "\n")
    options = ["--config", "debug", "--gpu", "H100", "--run", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["estimate.py", *options])
    estimate.main()
    gains = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.endswith(" x")]
    assert len(gains) == 3
    assert 1 < gains[0] < gains[1] < gains[2]


@pytest.mark.parametrize("prompts", [0, 4])
def test_without_more_prompts_than_a_step_takes_nothing_is_gained(prompts):
    equal = [(0.0, 50.0), (1.0, 50.0)]
    assert estimate.tokens_waited(equal, needed=4, prompts=prompts, max_age=2) == pytest.approx(50)


def test_no_group_is_carried_beyond_the_greatest_age():
    tail = [(0.0, 1.0), (0.9, 1.0), (1.0, 1000.0)]
    young, old = (estimate.tokens_waited(tail, needed=4, prompts=8, max_age=age) for age in (1, 8))
    assert old < young


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--config", "debgu"], "--config = 'debgu': expected a registered name"),
        (["--config", "qwen3"], "--config qwen3 reads its model from a folder"),
        (["--config", "debug", "--gpus", "0"], "--gpus 0: expected a number above 0"),
        (["--config", "debug", "--sync-share", "nan"], "--sync-share nan: expected a number above 0"),
        (["--config", "debug", "--run", "nowhere"], "--run nowhere has no metrics.jsonl"),
    ],
)
def test_each_wrong_option_is_one_sentence(monkeypatch, capsys, options, says):
    monkeypatch.setattr(sys, "argv", ["estimate.py", *options])
    with pytest.raises(SystemExit, match="2"):
        estimate.main()
    assert f"error: {says}" in capsys.readouterr().err
