"""Ends the processes that a call has left behind, also those that are no longer in its process group (daemons).

Each call has a mark of its own in the environment, which its processes inherit. /proc shows the environment with which a process
was started, so the mark stays when the process changes its group, its session or its parent.
"""

import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path

CALL_VARIABLE = "TORCHTITAN_RL_CALL"
"""The environment variable with the mark of a call."""

MOST_ROUNDS = 20
"""A process may start others while it is looked for, so the search is repeated until it finds none, at most so often."""


def new_mark() -> str:
    """A value for CALL_VARIABLE."""
    return uuid.uuid4().hex


def kill_marked_since(mark: str, first_pid: int) -> None:
    """Kill all processes that were started with `mark`. `first_pid` is the first of them, which may have ended."""
    entry = f"{CALL_VARIABLE}={mark}".encode()
    for _ in range(MOST_ROUNDS):
        found = [pid for pid in _pids_since(first_pid) if entry in _environment(pid)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _pids_since(first: int) -> list[int]:
    """Ids of the processes that were started after process `first`: higher ones, until the kernel begins again at the lowest."""
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if pid > first or last < first]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []
