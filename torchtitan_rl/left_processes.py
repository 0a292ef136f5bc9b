"""Ends the processes that a call or a job has left behind, also those that are no longer in its process group (daemons).

Each has a mark of its own in the environment, which its processes inherit. /proc shows the environment with which a process
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


def find_marked(entry: str, first_pid: int = 0) -> list[int]:
    """Ids of the other living processes that were started with `entry` ("NAME=value") in their environment.

    Args:
        first_pid: the first of them, which may have ended. Lower ids are left out, until the kernel begins again at the lowest.
    """
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    later = [pid for pid in pids if pid != os.getpid() and (pid > first_pid or last < first_pid)]
    return [pid for pid in later if entry.encode() in _environment(pid)]


def kill_marked(entry: str, first_pid: int = 0) -> None:
    """Kill the processes of `find_marked`, and those that they start meanwhile."""
    for _ in range(MOST_ROUNDS):
        found = find_marked(entry, first_pid)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []
