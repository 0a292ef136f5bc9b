"""The processes of a job on this node: their states, their signals, and their end with the launcher."""

import ctypes
import os
import shutil
import signal
from pathlib import Path

from torchtitan_rl.left_processes import kill_marked

WATCH_VARIABLE = "TORCHTITAN_RL_WATCH"
"""The environment variable that names the folder of the ranks' statuses, if a launcher watches. All processes of a job on this node
have it, so it also marks them."""

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and end."""

SAME_REQUEST_S = 1.0
"""Signals within this time are one request: torchrun, a terminal and a batch system may each send one."""


def stop_signals() -> list[int]:
    """The signals of STOP_SIGNALS that this process must handle: nohup has it ignore SIGHUP."""
    return [
        n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN
    ]


def signal_name(number: int) -> str:
    """The name of a signal. Python has none for most real-time signals: signal_name(35) == "SIGRTMIN+1"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(128 + signal.SIGKILL)


def state(pid: int) -> str:
    """The kernel's letter for a process's state: R, S, D, T (stopped), Z (dead, not yet waited for); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    return state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a process."""
    return state(pid) in ("T", "t")


def peak_bytes(pid: int) -> int:
    """The peak memory of a living process, in bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def children(pid: int) -> list[int]:
    """Ids of the processes that a process's main thread has started or adopted as orphans; [] if it is gone."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, which may be gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def start_reaper(folder: Path) -> None:
    """Fork a process that waits for the end of this one, then kills the job's remaining processes and removes `folder`, its ranks' statuses.

    The kernel kills the ranks with their parent. Processes that ranks have started, such as a reward's sandbox, need this reaper.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        os.set_inheritable(writer, False)  # only this process holds it
        return
    os.setsid()  # a terminal's Ctrl-C and a killed process group do not reach it
    os.close(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a reader of the job's output must not wait for this process
        os.dup2(null, stream)
    os.read(reader, 1)
    kill_marked(f"{WATCH_VARIABLE}={folder}")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
