"""A parent process for a rank that no launcher watches: a run that has not come to its end is no success.

Without `resilience.launch`, torchrun or a shell sees only a rank's exit code. Code that ends the process in the middle of training
by os._exit(0) would look like a finished run. So the rank is forked: its parent waits, forwards signals, and ends with the
rank's code, but with 1 instead of 0 if the rank has not said that it is done. It also ends a rank that reads its config forever.
"""

import faulthandler
import mmap
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from torchtitan_rl.core.events import IMPORTING, Listener
from torchtitan_rl.resilience.job_processes import (
    WATCH_VARIABLE,
    die_with_parent,
    send_signal,
    signal_name,
    stop_signals,
)
from torchtitan_rl.resilience.watchdog import READING_LIMIT_S

_GOES_ON, _READS, _DONE = range(3)
"""The facts that the rank reports about itself."""
_TO_GO_ON = "The same command with --dump-folder, if it has one, goes on from the last checkpoint."
_STACK_S = 1.0
"""Seconds that a rank has to write its stacks before it is ended."""

_state: mmap.mmap | None = None
"""One byte and the rank's phase as text, which the rank and its parent share; None if there is no such parent."""
_PHASE_BYTES = 1024
_limit_s = READING_LIMIT_S
"""Seconds that reading the config may take."""


def fork_rank(reading_limit_s: float = READING_LIMIT_S) -> None:
    """Fork, unless the launcher watches. Returns in the child, which is the rank. The parent ends when the child has ended.

    Call it before torch is imported: a process that was forked after CUDA was asked for its devices cannot use them.

    Args:
        reading_limit_s: seconds that reading the config may take.
    """
    global _state, _limit_s
    if WATCH_VARIABLE in os.environ:
        return
    _state, _limit_s = mmap.mmap(-1, 1 + _PHASE_BYTES), reading_limit_s
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    forwarded = {*stop_signals(), signal.SIGALRM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    sent, status, reads_until = set(), None, None
    while status is None:
        got = signal.sigtimedwait({*forwarded, signal.SIGCHLD}, 1.0)
        if got is not None and got.si_signo in forwarded:
            sent.add(got.si_signo)
            send_signal(child, got.si_signo)
        ended, of_child = os.waitpid(child, os.WNOHANG)
        status = of_child if ended else None
        now = time.monotonic()
        reads_until = (reads_until or now + reading_limit_s + _STACK_S) if _state[0] == _READS else None
        if status is None and reads_until is not None and now > reads_until:
            _end_reader(child, reading_limit_s)
    _end_like(os.waitstatus_to_exitcode(status), sent, done=_state[0] == _DONE)


def begin_reading() -> None:
    """Tell the parent that the rank imports its config now. It ends a rank that takes too long, after it has written its stacks."""
    if _state is not None:
        faulthandler.dump_traceback_later(_limit_s)
        _state[0] = _READS


def end_reading() -> None:
    """Tell the parent that the config is read."""
    if _state is not None:
        faulthandler.cancel_dump_traceback_later()
        _state[0] = _GOES_ON


class PhaseForParent(Listener):
    """Sends the rank's phase to the parent, which names it if the rank dies."""

    def moved(self, where: str) -> None:
        if _state is not None:
            _state[1:] = where.encode(errors="replace")[:_PHASE_BYTES].ljust(_PHASE_BYTES)


def say_done() -> None:
    """Tell the parent that this rank ends as planned. Without it, exit code 0 counts as a failure."""
    if _state is not None:
        _state[0] = _DONE


def _end_reader(child: int, limit_s: float) -> NoReturn:
    """End a rank that does not come to the end of its config, and this process with 1."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _print(f"rank {_rank()} has read the config for {limit_s:g} s: an import in it loops or waits. It is ended.")
    os._exit(1)


def _end_like(code: int, sent: set[int], *, done: bool) -> NoReturn:
    """End this process with a child's exit code or signal. Print why the child ended if it could not print it."""
    phase = bytes(_state[1:]).strip(b" \0").decode(errors="replace")
    where = f" in: {phase}" if IMPORTING in phase else ""
    if code == 0 and not done:
        _print(
            f"rank {_rank()} ended with code 0 before the end of training{where}: something called os._exit(0). The run is not "
            f"done. {_TO_GO_ON}"
        )
        os._exit(1)
    if code > 0 and where:
        _print(f"rank {_rank()} ended with code {code}{where}: something called os._exit({code}).")
    if code >= 0:
        os._exit(code)
    if -code not in sent:
        name = signal_name(-code)
        _print(f"rank {_rank()} was killed by signal {-code} ({name}) before the end of training. {_TO_GO_ON}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the child has left one
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
