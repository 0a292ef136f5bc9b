"""Limits how much user code prints, and keeps a run going if nobody reads its output."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

from torchtitan_rl.core.events import Listener

logger = logging.getLogger(__name__)

SHOWN, KEPT, KEPT_OF_RUN = 4_000, 1_000_000, 100_000_000
"""Characters per stream: shown on the terminal in a step, then written to logs/rank_N.log in a step, and in the whole run."""

OVERDUE = "other threads, such as those of calls that timed out,"
_OWN_THREADS = ("MainThread", "heartbeat", "sink ")
_TRACKERS = ("sink wandb", "sink trackio", "sink tensorboard")
"""Threads of sinks whose libraries print about themselves. This is for people: in a pipe or a file it is left out."""


_mask: Callable[[str], str] = str


def mask_output(mask: Callable[[str], str]) -> None:
    """Pass all later output through `mask`, for example to hide secrets."""
    global _mask
    _mask = mask


def limit_streams() -> list["_LimitedStream"]:
    """Replace stdout and stderr by streams that limit output, if they are not yet. Returns the two streams."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _LimitedStream):
            setattr(sys, name, _LimitedStream(name, getattr(sys, name)))
    return [sys.stdout, sys.stderr]


_of_this_thread = threading.local()


def print_as(whose: str | None) -> None:
    """Count what this thread prints as output of `whose`, including what it prints before `bounded_output(whose)`."""
    _of_this_thread.whose = whose


@contextmanager
def bounded_output(whose: str) -> Iterator[None]:
    """Limit what is printed inside, also by the main thread, and say how much is not shown.

    Calls that timed out continue in their threads. Their output stays limited after the block.

    Args:
        whose: the name for messages. Example: "reward functions"
    """
    streams = limit_streams()
    for stream in streams:
        stream.begin(whose)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams  # user code may have replaced them
        for stream in streams:
            stream.begin(OVERDUE)


class BoundedOutput(Listener):
    """Limits what user code prints."""

    def output_of(self, whose: str) -> AbstractContextManager[None]:
        return bounded_output(whose)


@dataclass(slots=True)
class _Output:
    """Output of one source since the last message about it."""

    whose: str
    count: int = 0
    rest: io.StringIO = field(default_factory=io.StringIO)
    """The part that is only written to the log."""


class _LimitedStream(io.TextIOBase):
    """A stream that limits what is written to another one."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream, self._whose = name, stream, OVERDUE
        self._outputs: dict[str, _Output] = {}
        self._lock = threading.Lock()
        self._left, self._refused = KEPT_OF_RUN, False

    def begin(self, whose: str) -> None:
        """Count the following output as `whose`. Say how much of the output until now is not shown."""
        with self._lock:
            output = self._outputs.pop(self._whose, _Output(self._whose))
            self._whose = whose
        if output.count > SHOWN:
            said = f"{output.whose} printed {output.count:,} characters here: the first {SHOWN:,} are shown, more are in the run's logs/"
            self._show(f"\n... {said}\n")
            logger.info("%s printed more: %s", output.whose, output.rest.getvalue())  # only to the rank's log

    def write(self, text: str) -> int:
        """Show the text, or keep it if its source has printed too much. Returns its length."""
        thread = threading.current_thread()
        if thread.name.startswith(_TRACKERS) and not self.isatty():
            return len(text)
        if thread.name.startswith(_OWN_THREADS) and (self._whose == OVERDUE or thread is not threading.main_thread()):
            self._show(text)
            return len(text)
        with self._lock:  # `begin` must not take the output between its count and its text
            whose = getattr(_of_this_thread, "whose", None) or self._whose
            output = self._outputs.setdefault(whose, _Output(whose))
            shown, kept = (max(0, most - output.count) for most in (SHOWN, SHOWN + KEPT))
            self._left -= output.rest.write(text[shown : min(kept, shown + self._left)])
            output.count += len(text)
        self._show(text[:shown])
        return len(text)

    def _show(self, text: str) -> None:
        """Write to the stream. If that fails, as after `| head` or on a full disk, the text is lost and training continues."""
        try:
            self._stream.write(_mask(text))
        except (OSError, ValueError) as error:
            if not self._refused:
                self._refused = True
                level = (
                    logging.INFO if isinstance(error, BrokenPipeError) else logging.WARNING
                )  # the reader has what it wants
                logger.log(
                    level,
                    f"{self._name} cannot be written any more ({error}): training continues, and its logs are in the run's folder",
                )

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Does nothing: user code must not close the stream."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding
