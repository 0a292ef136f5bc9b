"""Phases outside steps are visible, and timed ones recorded."""

import threading
import time

from torchtitan_rl.observe import phase, progress, terminal


def wait_until(happened):
    """Return when `happened()` is true, which may take long on a busy machine."""
    give_up = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_long_phase_prints_heartbeats_at_growing_intervals(capsys, monkeypatch):
    assert (terminal.HEARTBEAT_SECONDS, terminal.LONGEST_SILENCE_SECONDS) == (8.0, 120.0)
    monkeypatch.setattr(terminal, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "LONGEST_SILENCE_SECONDS", 0.3)
    said = []
    monkeypatch.setattr(terminal, "progress", lambda text: said.append((time.monotonic(), text)))
    began = time.monotonic()
    with phase("slow"):
        wait_until(lambda: len(said) == 1 + 5)  # lines at 0.1, 0.2, 0.4, 0.7 and 1.0 s, or later
    number = len(said)
    assert [text for _, text in said[:1]] == ["slow ..."]
    assert all(text.startswith("slow ... ") for _, text in said[1:-1])
    times = [moment - began for moment, _ in said[1:-1]]
    assert all(moment >= least for moment, least in zip(times, (0.1, 0.2, 0.4, 0.7, 1.0), strict=False)), times
    time.sleep(0.35)
    assert len(said) == number
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_only_rank_0_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    progress("hello")
    with phase("quiet"):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    progress("hello")
    assert capsys.readouterr().out == "hello\n"
