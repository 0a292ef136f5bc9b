"""A parent process for a rank that no launcher watches: a run that has not come to its end is no success.

Without `resilience.launch`, torchrun or a shell sees only a rank's exit code. Code that ends the process in the middle of training
by os._exit(0) would look like a finished run. So the rank is forked: its parent waits, forwards signals, and ends with the
rank's code, but with 1 instead of 0 if the rank has not said that it is done.
"""

import mmap
import os
import resource
import signal
import sys
from contextlib import suppress

from torchtitan_rl.resilience.job_processes import WATCH_VARIABLE, die_with_parent, send_signal, stop_signals

_done: mmap.mmap | None = None
"""One byte that the rank and its parent share; None if there is no such parent."""


def fork_rank() -> None:
    """Fork, unless the launcher watches. Returns in the child, which is the rank. The parent ends when the child has ended.

    Call it before torch is imported: a process that was forked after CUDA was asked for its devices cannot use them.
    """
    global _done
    if WATCH_VARIABLE in os.environ:
        return
    _done = mmap.mmap(-1, 1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    forwarded = {*stop_signals(), signal.SIGALRM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    sent, status = set(), None
    while status is None:
        number = signal.sigwait({*forwarded, signal.SIGCHLD})
        if number in forwarded:
            sent.add(number)
            send_signal(child, number)
        ended, of_child = os.waitpid(child, os.WNOHANG)
        status = of_child if ended else None
    _end_like(os.waitstatus_to_exitcode(status), sent, done=_done[0] == 1)


def say_done() -> None:
    """Tell the parent that this rank ends as planned. Without it, exit code 0 counts as a failure."""
    if _done is not None:
        _done[0] = 1


def _end_like(code: int, sent: set[int], *, done: bool) -> None:
    """End this process with a child's exit code or signal. Say why the child ended, if it cannot have said it itself."""
    rank = os.environ.get("RANK", "0")
    if code == 0 and not done:
        _say(
            f"rank {rank} ended with code 0 before the end of training: something called os._exit(0). The run is not done."
        )
        os._exit(1)
    if code >= 0:
        os._exit(code)
    if -code not in sent:
        _say(f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}) before the end of training.")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the child has left one
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _say(text: str) -> None:
    goes_on = "The same command with --dump-folder, if it has one, goes on from the last checkpoint."
    with suppress(OSError):
        print(f"{text} {goes_on}", file=sys.stderr, flush=True)
