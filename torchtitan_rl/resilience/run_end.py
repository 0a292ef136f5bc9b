"""How a run ended, in a small file of its folder (end.json). The report's headline is made from it.

The first process that knows the cause writes the file: the rank that failed, rank 0 of a run that is complete, or the launcher
for a rank that was killed or that hung. Later ones leave it as it is.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from torchtitan_rl.core.events import Kind, Listener
from torchtitan_rl.core.text import head_and_tail

END = "end.json"
REPORT = "report.html"
MOST_CHARACTERS = 20_000
"""Longer error messages are cut in the middle."""
REPORT_LIMIT_S = 120.0
"""The launcher waits at most this long for the report of a run that ended without one."""

Outcome = Literal["done", "evaluated", "stopped", "failed", "killed", "hung"]
"""done: all that was to be done; evaluated: --eval-only; stopped: by a signal, or by training itself; failed: an error; killed: a
rank was ended by a signal; hung: the watchdog ended the job."""


class Phases(Listener):
    """The seconds of the start's phases, and the phase in which an error began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Of the phases outside of steps, such as "start the vLLM engine", in their order."""
        self._passed: list[str] = []

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        """See Listener."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            self._passed.append(name)
            raise
        finally:
            if kind == "phase":
                self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    @property
    def failed(self) -> str:
        """The contexts that an error has left, outermost and innermost. Example: "step 3: grade". "" if there was none."""
        return ": ".join(dict.fromkeys([*self._passed[-1:], *self._passed[:1]]))


def forget_end(folder: Path) -> None:
    """Remove the file of an earlier start of the run."""
    (folder / END).unlink(missing_ok=True)


def write_end(
    folder: Path,
    outcome: Outcome,
    message: str = "",
    *,
    code: int = 0,
    rank: int | None = None,
    phase: str = "",
    started_s: dict[str, float] | None = None,
) -> None:
    """Write how the run ended, unless that is written already. Never raises: a full disk may be why the run ends.

    Args:
        message: why, for a person; the error with its traceback if it was unforeseen.
        code: the exit code.
        rank: the rank that failed.
        phase: where it failed, such as "step 3: grade".
        started_s: seconds of the start's phases.
    """
    content = {
        "outcome": outcome, "message": head_and_tail(message, MOST_CHARACTERS), "code": code, "rank": rank, "phase": phase,
        "time": time.time(), "started_s": {name: round(s, 2) for name, s in (started_s or {}).items()},
    }  # fmt: skip
    unfinished = folder / f".{END}.{os.getpid()}"
    with suppress(OSError):
        unfinished.write_text(json.dumps(content, indent=1) + "\n", "utf-8", "backslashreplace")
        with suppress(FileExistsError):
            os.link(unfinished, folder / END)  # fails if another process was first
        unfinished.unlink()


def ensure_report(folder: Path) -> None:
    """Write the run's report if it is missing or older than its end. It needs no torch and runs in a process of its own."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        settings = json.loads((folder / "config.json").read_text())
        metrics = settings.get("metrics", {})
        wanted = metrics.get("enabled", True) and metrics.get("report", True)
        report, end = folder / REPORT, folder / END
        if wanted and not (report.exists() and report.stat().st_mtime >= end.stat().st_mtime):
            command = [sys.executable, "-m", "torchtitan_rl.report", str(folder), "--output", str(report)]
            subprocess.run(
                command, check=False, timeout=REPORT_LIMIT_S, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
