"""A parent process for a rank that no launcher watches: a run that has not come to its end is no success.

Without `resilience.launch`, torchrun or a shell sees only a rank's exit code. Code that ends the process in the middle of training
by os._exit(0) would look like a finished run. So the rank is forked: its parent waits, forwards signals, and ends with the
rank's code, but with 1 instead of 0 if the rank's status does not say that it is done. It also ends a rank that reads its config
forever.
"""

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torchtitan_rl.core.events import IMPORTING
from torchtitan_rl.resilience.job_processes import (
    WATCH_VARIABLE,
    die_with_parent,
    send_signal,
    signal_name,
    stop_signals,
)
from torchtitan_rl.resilience.rank_status import READING_CONFIG, RankStatus, read_statuses
from torchtitan_rl.resilience.watchdog import READING_LIMIT_S, stack_of

_TO_GO_ON = "The same command with --dump-folder, if it has one, goes on from the last checkpoint."


def fork_rank(reading_limit_s: float = READING_LIMIT_S) -> None:
    """Fork, unless the launcher watches. Returns in the child, which is the rank. The parent ends when the child has ended.

    Call it before torch is imported: a process that was forked after CUDA was asked for its devices cannot use them.

    Args:
        reading_limit_s: seconds that reading the config may take.
    """
    if WATCH_VARIABLE in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_rl-"))
    os.environ[WATCH_VARIABLE] = str(folder)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    forwarded = {*stop_signals(), signal.SIGALRM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    sent: set[int] = set()
    wait_status = None
    while wait_status is None:
        got = signal.sigtimedwait({*forwarded, signal.SIGCHLD}, 1.0)
        if got is not None and got.si_signo in forwarded:
            sent.add(got.si_signo)
            send_signal(child, got.si_signo)
        ended, of_child = os.waitpid(child, os.WNOHANG)
        wait_status = of_child if ended else None
        rank = next(iter(read_statuses(folder)), RankStatus(rank=int(_rank()), host="", pid=child))
        reads = wait_status is None and rank.phase == READING_CONFIG
        if reads and time.monotonic() - rank.since > reading_limit_s:
            _end_reader(rank, folder, reading_limit_s)
    shutil.rmtree(folder, ignore_errors=True)
    _end_like(os.waitstatus_to_exitcode(wait_status), sent, rank)


def _end_reader(rank: RankStatus, folder: Path, limit_s: float) -> NoReturn:
    """End a rank that does not come to the end of its config, and this process with 1."""
    _print(stack_of(rank, folder))
    os.kill(rank.pid, signal.SIGKILL)
    os.waitpid(rank.pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    _print(f"rank {_rank()} has read the config for {limit_s:g} s: an import in it loops or waits. It is ended.")
    os._exit(1)


def _end_like(code: int, sent: set[int], rank: RankStatus) -> NoReturn:
    """End this process with a child's exit code or signal. Print why the child ended if it could not print it."""
    phase = rank.importing or rank.phase
    where = f" in: {phase}" if IMPORTING in phase else ""
    if code == 0 and not rank.outcome:
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
