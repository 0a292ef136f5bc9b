"""Ctrl-C and a scheduler's SIGTERM end a run between two steps, with a checkpoint, instead of in the middle of one."""

import signal
from types import FrameType

from torchtitan_rl.observability import progress


class StopSignal:
    """Remembers the first SIGINT or SIGTERM; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        if not self.received:
            progress(f"{signal.Signals(number).name}: saving a checkpoint after this step; Ctrl-C again stops at once")
        self.received = True
