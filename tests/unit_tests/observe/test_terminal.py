"""Phases outside steps are visible, and timed ones recorded."""

import threading
import time
from types import SimpleNamespace

from torchtitan_rl import events
from torchtitan_rl.events import counted, heartbeat, timed
from torchtitan_rl.observe import phase, progress, terminal


def test_long_phase_prints_heartbeats_at_growing_intervals(capsys, monkeypatch):
    assert (terminal.HEARTBEAT_SECONDS, terminal.LONGEST_SILENCE_SECONDS) == (8.0, 120.0)
    monkeypatch.setattr(events, "_listeners", [terminal.Terminal()])  # a command in this process has one, too
    monkeypatch.setattr(terminal, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "LONGEST_SILENCE_SECONDS", 0.3)
    said = []
    monkeypatch.setattr(terminal, "progress", lambda text: said.append((time.monotonic(), text)))
    began = time.monotonic()
    with phase("slow"):
        give_up = began + 30  # on a busy machine
        while len(said) < 1 + 5 and time.monotonic() < give_up:
            time.sleep(0.01)
    time.sleep(0.35)
    first, *beats, last = said
    assert (first[1], last[1].startswith("slow: ")) == ("slow ...", True)
    assert all(text.startswith("slow ... ") for _, text in beats), beats
    times = [moment - began for moment, _ in beats]
    assert len(times) >= 5
    assert all(moment >= least for moment, least in zip(times, (0.1, 0.2, 0.4, 0.7, 1.0), strict=False)), times
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_heartbeat_says_how_many_completions_are_done_and_the_time_of_its_part(monkeypatch):
    monkeypatch.setattr(terminal, "HEARTBEAT_SECONDS", 0.05)
    said = []
    monkeypatch.setattr(terminal, "progress", said.append)
    completions = counted(range(3), total=3)
    moments = iter([0.0, 100.0])  # the evaluation's begin and its part's
    monkeypatch.setattr(events, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() - 500 + next(moments)))
    with heartbeat("evaluation"), timed("evaluation/generate"):
        next(completions)
        give_up = time.monotonic() + 30  # on a busy machine
        while not said and time.monotonic() < give_up:
            time.sleep(0.01)
    completions.close()
    assert said[0] == "evaluation: sampling, 1 of 3 completions ... 400 s"


def test_only_rank_0_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    progress("hello")
    with phase("quiet"):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    progress("hello")
    assert capsys.readouterr().out == "hello\n"
