"""What a rank's streams get: other people's code is bounded, whenever it prints, and a stream that nobody takes ends nothing."""

import io
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

from torchtitan_rl.core.events import Listener

logger = logging.getLogger(__name__)

SHOWN, KEPT, KEPT_OF_RUN = 4_000, 1_000_000, 100_000_000
"""Characters of one step, on each stream: on the terminal, and in logs/rank_N.log after those; and of the whole run there."""

OVERDUE = "other threads, such as those of calls that were given up,"
_OWN_THREADS = ("MainThread", "heartbeat", "sink ")


def keep_streams() -> list["_Kept"]:
    """Put streams that bound and outlast in the place of stdout and stderr, where they are not; returns them."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _Kept):
            setattr(sys, name, _Kept(name, getattr(sys, name)))
    return [sys.stdout, sys.stderr]


_of_this_thread = threading.local()


def print_as(whose: str | None) -> None:
    """From now on what this thread prints counts as `whose`, also before a `bounded_output(whose)`, which says the sum."""
    _of_this_thread.whose = whose


@contextmanager
def bounded_output(whose: str) -> Iterator[None]:
    """Bound what is printed inside, by the main thread too; say how much of it is not shown.

    Calls that were given up go on in their threads, and are bounded from then on, inside or not.

    Args:
        whose: for people. Example: "reward functions"
    """
    streams = keep_streams()
    for stream in streams:
        stream.begin(whose)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams  # whatever was put in their place
        for stream in streams:
            stream.begin(OVERDUE)


class BoundedOutput(Listener):
    """Bounds what other people's code prints."""

    def output_of(self, whose: str) -> AbstractContextManager[None]:
        """See Listener."""
        return bounded_output(whose)


@dataclass(slots=True)
class _Output:
    """What was printed as somebody's since it was last said."""

    count: int = 0
    rest: io.StringIO = field(default_factory=io.StringIO)
    """What of it is for the log alone."""


class _Kept(io.TextIOBase):
    """A stream in place of another."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream, self._whose = name, stream, OVERDUE
        self._outputs: defaultdict[str, _Output] = defaultdict(_Output)
        self._left, self._refused = KEPT_OF_RUN, False

    def begin(self, whose: str) -> None:
        """From here on it is `whose` output; say what of the output until now is not shown."""
        output = self._outputs.pop(self._whose, _Output())
        if output.count > SHOWN:
            said = f"{self._whose} printed {output.count:,} characters here: the first {SHOWN:,} are shown, more are in the run's logs/"
            self._show(f"\n... {said}\n")
            logger.info("%s printed more: %s", self._whose, output.rest.getvalue())  # in the rank's log alone
        self._whose = whose

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread.name.startswith(_OWN_THREADS) and (self._whose == OVERDUE or thread is not threading.main_thread()):
            self._show(text)
            return len(text)
        output = self._outputs[getattr(_of_this_thread, "whose", None) or self._whose]
        shown, kept = (max(0, most - output.count) for most in (SHOWN, SHOWN + KEPT))
        self._show(text[:shown])
        self._left -= output.rest.write(text[shown : min(kept, shown + self._left)])
        output.count += len(text)
        return len(text)

    def _show(self, text: str) -> None:
        """Write it. What the other end does not take, as after `| head` or on a full disk, is lost, and training goes on."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            if not self._refused:
                self._refused = True
                logger.warning(
                    f"{self._name} takes no more lines ({error}): training goes on, and is in the run's folder"
                )

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Not by those who print."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding
