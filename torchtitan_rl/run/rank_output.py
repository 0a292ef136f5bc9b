"""Sends a rank's output to the terminal or to a file in the run folder, and ends the rank with an error message."""

import logging
import logging.handlers
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import is_users_file
from torchtitan_rl.run.job_processes import STOP_SIGNALS
from torchtitan_rl.run.rank_status import mark_failed
from torchtitan_rl.text import visible

_KEPT = re.compile(r"(\x1b\[[\d;]*m|\r)")
"""Colours, as rich writes them, and the return to the line's begin in progress bars."""


def log_library_warnings() -> Callable[..., None]:
    """Make Python's warnings log records: those of the user's own code this project's, which the terminal shows, all others not.

    Returns the function that showed them before.
    """
    before = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        name = "torchtitan_rl.warnings" if is_users_file(filename) else "py.warnings"
        text = warnings.formatwarning(message, category, filename, lineno, line)
        logging.getLogger(name).warning(text.rstrip())

    logging.getLogger("py.warnings").addHandler(logging.NullHandler())  # else they go to stderr
    warnings.showwarning = show
    return before


class RankLog:
    """Writes one rank's log records, including those and the warnings of libraries, to a file in the run folder.

    The terminal gets this project's warnings and the libraries' errors.
    """

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self._root = logging.getLogger()
        self._level_before, self._raises_before = self._root.level, logging.raiseExceptions
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.startswith("torchtitan_rl"))  # fmt: skip
        handler.setLevel(logging.WARNING)
        handler.setFormatter(_Visible("%(levelname)s: %(message)s"))
        self._root.addHandler(handler)
        self._before_file = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
        self._root.addHandler(self._before_file)
        self._handlers: list[logging.Handler] = [handler, self._before_file]
        self._root.setLevel(logging.INFO)
        self._show_warning_before = log_library_warnings()
        logging.raiseExceptions = False  # a full disk would get a traceback for each record
        # torch prints its warnings itself.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    def to_file(self, run_folder: Path) -> Path:
        """Write log records to `run_folder`/logs/rank_N.log. Returns that path."""
        path = run_folder / "logs" / f"rank_{self.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
        handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._root.addHandler(handler)
        self._handlers.append(handler)
        self._root.removeHandler(self._before_file)
        self._before_file.setTarget(handler)
        self._before_file.flush()
        return path

    def close(self) -> None:
        """Give the process its logging back, as a notebook's goes on after the run."""
        self._root.setLevel(self._level_before)
        logging.raiseExceptions = self._raises_before
        warnings.showwarning = self._show_warning_before
        for handler in self._handlers:
            self._root.removeHandler(handler)
            handler.close()


class RankOutput(RankLog):
    """The output of a rank that has its process for itself. One rank's is shown on the terminal; the others' goes to their log files."""

    def __init__(self, *, rank: int, shown_rank: str) -> None:
        self._shown_rank = shown_rank
        self._terminal = os.dup(2)
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal shows \xe9
        super().__init__(rank=rank)
        if not self.shown:
            self._redirect(os.devnull)
        sys.stdout, sys.stderr = (OutputStream(stream) for stream in (sys.stdout, sys.stderr))

    @property
    def shown(self) -> bool:
        """Whether this rank's output reaches the terminal."""
        return self._shown_rank == str(self.rank)

    def check_shown_rank(self, world_size: int) -> None:
        is_rank = self._shown_rank in map(str, range(world_size))
        expected = f"a rank, 0 to {world_size - 1}"
        expect(is_rank, "LOG_RANK", self._shown_rank, expected, "Leave it out for 0.")

    def to_file(self, run_folder: Path) -> Path:
        """Write log records to `run_folder`/logs/rank_N.log, and also the output if it is not shown. Returns that path."""
        path = super().to_file(run_folder)
        if not self.shown:
            self._redirect(path)
        return path

    def _redirect(self, path: str | Path) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def fail(self, message: str, code: int) -> None:
        """Print the message and end this process, without waiting for the engine's threads or other ranks.

        Only the first rank of a node to fail prints: the others fail for the same reason or because it is gone.
        """
        for number in STOP_SIGNALS:  # torchrun sends one when another rank has failed: end at once
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger(__name__).info("this rank failed: %s", message)
        sys.stdout.flush()
        sys.stderr.flush()
        if mark_failed():
            text = visible(f"rank {self.rank}: {message}" if self.rank else message)
            with suppress(OSError):  # nobody reads it
                os.write(self._terminal, f"{text.rstrip()}\n".encode(errors="backslashreplace"))
        os._exit(code)

    @staticmethod
    def end(code: int) -> None:
        """End this process with `code`, without the engine's destructors, which could change it."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class OutputStream:
    """Passes what is printed through `visible`. A text that cannot be written, as after `| head`, is lost in silence."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            parts = (part if _KEPT.match(part) else visible(part) for part in _KEPT.split(text))
            self._stream.write("".join(parts))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Does nothing: user code must not close the stream."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Visible(logging.Formatter):
    """Makes the control characters of whole records, with their tracebacks, visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
