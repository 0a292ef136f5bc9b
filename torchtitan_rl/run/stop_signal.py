"""Signals that end a run between two steps, with a checkpoint: Ctrl-C, a scheduler's SIGTERM, a time limit's SIGUSR1."""

import os
import signal
import threading
import time
from types import FrameType

from torchtitan_rl.events import progress
from torchtitan_rl.run import job_processes
from torchtitan_rl.run.rank_status import rank_failed


class StopSignal:
    """Stores the first stop signal. A second one has the effect that it had before: it ends the process, or a notebook's cell.

    torchrun also sends SIGTERM when another rank has failed, and then the step cannot be finished: the signal has its former
    effect. Signals reach only the main thread: a run in another one does not hear them.
    """

    def __init__(self) -> None:
        self.number = 0
        """The first signal that was received; 0 if there was none."""
        self.effect = "saving a checkpoint after this step"
        """The effect of the first signal, for its message."""
        self._at = 0.0
        self._before = {number: signal.getsignal(number) for number in job_processes.STOP_SIGNALS}
        os.register_at_fork(after_in_child=_disarm)

    def requested(self) -> int:
        """Returns the first signal, 0 for none. Installs the handlers, at each call: rewards and tools may have replaced them."""
        if threading.current_thread() is threading.main_thread():
            for number in job_processes.stop_signals():
                signal.signal(number, self._handle)
        return self.number

    def restore(self) -> None:
        """Give the signals the effect that they had before."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.number and now - self._at > job_processes.SAME_REQUEST_S
        if again or rank_failed():
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        if not self.number:
            progress(f"{signal.Signals(number).name}: {self.effect}; a second signal stops at once")
            self.number, self._at = number, now


def _disarm() -> None:
    """Restore the defaults in processes that rewards and tools fork: a pool ends them by SIGTERM and waits for their end."""
    for number in job_processes.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
