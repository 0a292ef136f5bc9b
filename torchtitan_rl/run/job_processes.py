"""The processes of a job on this node: their states, their signals, and their end."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and end."""

SAME_REQUEST_S = 1.0
"""Signals within this time are one request: torchrun, a terminal and a batch system may each send one."""


def stop_signals() -> list[int]:
    """The signals of STOP_SIGNALS that this process must handle: nohup has it ignore SIGHUP."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in STOP_SIGNALS if not (n == signal.SIGHUP and ignores)]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of the processes that this one's descendants leave behind."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def state(pid: int) -> str:
    """The kernel's letter for a process's state: R, S, D, T (stopped), Z (dead, not yet waited for); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def children() -> list[int]:
    """Ids of the processes that this one has started or adopted."""
    pids: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += [int(pid) for pid in file.read_text().split()]
    return pids


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_children() -> None:
    """Kill this process's children, and those that it adopts when they die, for at most 5 s."""
    deadline = time.monotonic() + 5.0
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
