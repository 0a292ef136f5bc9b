"""The processes of a job on this node: found by the mark in their environment, whoever their parent is by now, and ended."""

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and end."""

SAME_REQUEST_S = 1.0
"""Those closer together than this are one request: torchrun, a terminal and a batch system may each send it."""


def stops() -> list[int]:
    """Those that this process hears: under nohup it was told not to hear the end of its terminal."""
    return [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(128 + signal.SIGKILL)


def state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), Z (dead and not yet waited for); "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a process."""
    return state(pid) in ("T", "t")


def peak_bytes(pid: int) -> int:
    """The most memory that a living process has had at once; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def children(pid: int) -> list[int]:
    """Ids of the processes that the main thread of a process has started, or was given as orphans; [] when it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def marked(mark: str) -> list[int]:
    """Ids of all other living processes whose environment began with this entry ("NAME=value") in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            of_job = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if of_job and int(folder.name) != os.getpid() and state(int(folder.name)) not in ("", "Z"):
            found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> None:
    """Kill them, and what they start meanwhile."""
    for _ in range(20):
        pids = marked(mark)
        for pid in pids:
            send(pid, signal.SIGKILL)
        if not pids:
            return


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def start_guard(mark: str) -> None:
    """Fork a process that does nothing until this one ends, however it ends, and then kills all that is left of the job.

    Ranks die with their parent by the kernel's hand; what they started (a reward's sandbox, say) only by this.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        os.set_inheritable(writer, False)  # held by this process alone
        return
    os.setsid()  # no terminal's Ctrl-C, no killed process group
    os.close(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for stream in (0, 1, 2):  # who reads our output must not wait for this process
        os.close(stream)
    os.read(reader, 1)
    kill_marked(mark)
    os._exit(0)
