"""Ctrl-C and a scheduler's SIGTERM end a run between two steps, with a checkpoint, instead of in the middle of one."""

import signal
from pathlib import Path
from types import FrameType

from torchtitan_rl.observability import progress


class StopSignal:
    """Remembers the first SIGINT or SIGTERM; a second SIGINT ends the process at once.

    torchrun also sends SIGTERM when another rank has failed. There is no end of the step to wait for then: a failing rank
    leaves a marker file, and with it the signal ends the process as it would without this class.
    """

    def __init__(self, *, failure_marker: Path) -> None:
        self.received = False
        self._failure_marker = failure_marker
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self.received and number == signal.SIGINT) or self._failure_marker.exists():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.received:
            progress(f"{signal.Signals(number).name}: saving a checkpoint after this step; Ctrl-C again stops at once")
        self.received = True
