"""scripts/estimate.py: its numbers are those of the efficiency metrics."""

import sys

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
