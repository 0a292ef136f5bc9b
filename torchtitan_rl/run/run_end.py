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

from torchtitan_rl.events import Kind, Listener
from torchtitan_rl.text import head_and_tail

END, LOCK = "end.json", "run.lock"
REPORT = "report.html"
MOST_CHARACTERS = 20_000
"""Longer error messages are cut in the middle."""
REPORT_LIMIT_S = 120.0
"""The launcher waits at most this long for the report of a run that ended without one."""

Outcome = Literal["done", "evaluated", "stopped", "failed", "killed", "hung"]
"""done: all that was to be done; evaluated: --eval-only; stopped: by a signal, or by training itself; failed: an error; killed: a
rank was ended by a signal; hung: the watchdog ended the job."""


class Phases(Listener):
    """Notes on an error which contexts it leaves, for `phase_of`."""

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.__dict__.setdefault(_LEFT, []).append(name)
            raise


_LEFT = "torchtitan_rl_left"
"""The attribute of an error with the names of the contexts that it has left, innermost first."""


def phase_of(error: BaseException) -> str:
    """The outermost and the innermost context in which an error, or the error that caused it, was raised.

    Example: "step 3: grade". "" if it was raised outside of all contexts.
    """
    left: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        theirs = getattr(cause, _LEFT, [])
        left = [*(name for name in theirs if name not in left), *left]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ": ".join(dict.fromkeys([*left[-1:], *left[:1]]))


def write_end(
    folder: Path,
    outcome: Outcome,
    message: str = "",
    *,
    error: str = "",
    code: int = 0,
    rank: int | None = None,
    phase: str = "",
) -> None:
    """Write how the run ended, unless this start has written it already. Never raises: a full disk may be why the run ends.

    Args:
        message: why, for a person; the error with its traceback if it was unforeseen.
        error: the same without the traceback, to be read first.
        code: the exit code.
        rank: the rank that failed.
        phase: where it failed, such as "step 3: grade".
    """
    content = {
        "outcome": outcome, "error": head_and_tail(error, MOST_CHARACTERS), "message": head_and_tail(message, MOST_CHARACTERS), "code": code, "rank": rank, "phase": phase,
        "time": time.time(),
    }  # fmt: skip
    forget_earlier_end(folder)
    unfinished = folder / f".{END}.{os.getpid()}"
    with suppress(OSError):
        unfinished.write_text(json.dumps(content, indent=1) + "\n", "utf-8", "backslashreplace")
        with suppress(FileExistsError):
            os.link(unfinished, folder / END)  # fails if another process was first
        unfinished.unlink()


def forget_earlier_end(folder: Path) -> None:
    """Remove an end that is older than the folder's lock, which each start writes: it is an earlier start's."""
    with suppress(OSError):
        if (folder / END).stat().st_mtime_ns <= (folder / LOCK).stat().st_mtime_ns:
            (folder / END).unlink()


def ensure_report(folder: Path) -> None:
    """Write the run's report if it is missing or older than its end. It needs no torch and runs in a process of its own."""
    # ValueError or AttributeError: a config.json that is no object.
    with suppress(OSError, ValueError, AttributeError, subprocess.SubprocessError):
        settings = json.loads((folder / "config.json").read_text())
        wanted = settings.get("metrics", {}).get("report", True)
        report, end = folder / REPORT, folder / END
        if wanted and not (report.exists() and report.stat().st_mtime >= end.stat().st_mtime):
            command = [
                sys.executable,
                "-m",
                "torchtitan_rl.observe.report",
                str(folder),
                "--output",
                str(report),
            ]
            null = subprocess.DEVNULL
            subprocess.run(
                command, check=True, timeout=REPORT_LIMIT_S, stdin=null, stdout=null, stderr=null
            )
            print(f"report: {report}", flush=True)
