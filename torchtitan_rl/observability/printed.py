"""What other people's code prints: its beginning on the terminal, more of it in the rank's log, and an end to it."""

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO

from torchtitan_rl.observability.progress import HEARTBEAT_THREAD

logger = logging.getLogger(__name__)

SHOWN, KEPT = 4_000, 1_000_000
"""Characters of one step, on each stream: on the terminal, and in logs/rank_N.log after those."""


@contextmanager
def bounded_output(whose: str) -> Iterator[None]:
    """Bound what is printed inside, by any thread but the heartbeat's; say how much of it is not shown.

    Args:
        whose: for people. Example: "reward functions"
    """
    with (
        _bounded(sys.stdout, whose) as out,
        redirect_stdout(out),
        _bounded(sys.stderr, whose) as err,
        redirect_stderr(err),
    ):
        yield


@contextmanager
def _bounded(stream: TextIO, whose: str) -> Iterator["_Bounded"]:
    bounded = _Bounded(stream, whose)
    try:
        yield bounded
    finally:
        bounded.conclude()


class _Bounded(io.TextIOBase):
    """A stream in place of another."""

    def __init__(self, stream: TextIO, whose: str) -> None:
        self._stream, self._whose, self._count, self._rest = stream, whose, 0, io.StringIO()

    def write(self, text: str) -> int:
        if threading.current_thread().name == HEARTBEAT_THREAD:
            return self._stream.write(text)
        shown, kept = (max(0, most - self._count) for most in (SHOWN, SHOWN + KEPT))
        self._stream.write(text[:shown])
        self._rest.write(text[shown:kept])
        self._count += len(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def conclude(self) -> None:
        if self._count > SHOWN:
            said = f"{self._whose} printed {self._count:,} characters here: the first {SHOWN:,} are shown, more are in the run's logs/"
            with suppress(OSError, ValueError):
                self._stream.write(f"\n... {said}\n")
            logger.info("%s printed more: %s", self._whose, self._rest.getvalue())  # in the rank's log alone
