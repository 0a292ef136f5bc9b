"""Sends a rank's output to the terminal or to a file in the run folder, and ends the rank with an error message."""

import io
import logging
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from torchtitan_rl.errors import expect
from torchtitan_rl.run.job_processes import STOP_SIGNALS
from torchtitan_rl.text import visible

_KEPT = re.compile(r"(\x1b\[[\d;]*m|\r)")
"""Colours, as rich writes them, and the return to the line's begin in progress bars."""


def failure_marker(folder: Path) -> Path:
    """The file that a failing rank leaves, so that the others know that torchrun will end them."""
    return folder / "logs" / "failed"


class RankOutput:
    """Shows one rank's output on the terminal. The other ranks write theirs to a file in the run folder.

    Each rank's file also has all its log records, including those of libraries. The terminal gets this project's warnings and
    the libraries' errors.
    """

    def __init__(self, *, rank: int, shown_rank: str) -> None:
        self.rank = rank
        self._shown_rank = shown_rank
        self._terminal = os.dup(2)
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # like stderr: an ASCII terminal shows \xe9
        self._folder: Path | None = None
        handler = logging.StreamHandler()
        handler.addFilter(
            lambda record: (
                record.levelno >= logging.ERROR or record.name.startswith("torchtitan_rl")
            )
        )
        handler.setLevel(logging.WARNING)
        handler.setFormatter(_Visible("%(levelname)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.raiseExceptions = (
            False  # on a full disk a traceback would be printed for each record
        )
        logging.getLogger("torch.distributed.tensor").setLevel(
            logging.ERROR
        )  # torch prints its warnings itself
        if not self.shown:
            self._redirect(os.devnull)
        sys.stdout, sys.stderr = (OutputStream(stream) for stream in (sys.stdout, sys.stderr))

    @property
    def shown(self) -> bool:
        """Whether this rank's output reaches the terminal."""
        return self._shown_rank == str(self.rank)

    def check_shown_rank(self, world_size: int) -> None:
        """Raise UserError if LOG_RANK is not a rank."""
        ranks = [str(rank) for rank in range(world_size)]
        expected = f"a rank, 0 to {world_size - 1}"
        expect(
            self._shown_rank in ranks, "LOG_RANK", self._shown_rank, expected, "Leave it out for 0."
        )

    def to_file(self, run_folder: Path) -> None:
        """Write log records to `run_folder`/logs/rank_N.log, and also the output if it is not shown."""
        self._folder = run_folder
        path = run_folder / "logs" / f"rank_{self.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
        handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        if not self.shown:
            self._redirect(path)

    def _redirect(self, path: str | Path) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def fail(self, message: str, code: int) -> None:
        """Print the message and end this process, without waiting for the engine's threads or other ranks.

        Only one rank prints. With a run folder it is the first to fail, because the others fail for the same reason or because
        it is gone. Without one it is rank 0, and another rank only after some seconds, if nothing has ended it by then.
        """
        for number in STOP_SIGNALS:  # torchrun sends one when another rank has failed: end at once
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger(__name__).info("this rank failed: %s", message)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._folder is not None:
            try:
                failure_marker(self._folder).touch(exist_ok=False)
            except FileExistsError:
                os._exit(code)
            except OSError:  # a full disk or a deleted folder may be the reason to fail
                pass
        elif self.rank != 0:
            time.sleep(5)
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


class OutputStream(io.TextIOBase):
    """Passes what is printed through `visible`. A text that cannot be written, as after `| head`, is lost in silence."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Returns the length of the text, which is lost if the stream refuses it."""
        with suppress(OSError, ValueError):
            parts = _KEPT.split(text)
            self._stream.write(
                "".join(part if _KEPT.match(part) else visible(part) for part in parts)
            )
        return len(text)

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


class _Visible(logging.Formatter):
    """Makes the control characters of whole records, with their tracebacks, visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
