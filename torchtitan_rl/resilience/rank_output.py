"""What of a rank's output reaches the terminal, what is kept in the run folder, and a rank's last words."""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from torchtitan_rl.core.errors import expect
from torchtitan_rl.resilience.job_processes import STOP_SIGNALS


def failure_marker(folder: Path) -> Path:
    """The file that a failing rank leaves, so that the others know why they are being ended."""
    return folder / "logs" / "failed"


class RankOutput:
    """Whose output reaches the terminal: one rank's; the others write to a file of their own in the run folder.

    Every rank's log records, libraries' included, are in that file; the terminal gets this project's warnings, and only
    errors of the libraries.
    """

    def __init__(self, *, rank: int, shown_rank: str) -> None:
        self.rank = rank
        self._shown_rank = shown_rank
        self._terminal = os.dup(2)
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: an ASCII terminal shows \xe9 and ends nothing
        self._folder: Path | None = None
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.startswith("torchtitan_rl"))
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # torch prints these itself
        if not self.shown:
            self._redirect(os.devnull)

    @property
    def shown(self) -> bool:
        """Whether this rank's output reaches the terminal."""
        return self._shown_rank == str(self.rank)

    def check_shown_rank(self, world_size: int) -> None:
        """Raise UserError unless there is a rank whose output is shown."""
        ranks = [str(rank) for rank in range(world_size)]
        expected = f"a rank, 0 to {world_size - 1}"
        expect(self._shown_rank in ranks, "LOG_RANK", self._shown_rank, expected, "Leave it out for 0.")

    def to_file(self, run_folder: Path) -> None:
        """Keep log records in `run_folder`/logs/rank_N.log, and there the whole output of a hidden rank."""
        self._folder = run_folder
        path = run_folder / "logs" / f"rank_{self.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = LogFile(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        if not self.shown:
            self._redirect(path)

    def _redirect(self, path: str | Path) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def fail(self, message: str, code: int) -> None:
        """Say why and end this process, without waiting for threads of the engine or for other ranks.

        One rank speaks for all: within a run folder the first to fail, as the others fail alike or of its absence; before
        there is one, rank 0, and another only if it is still here some seconds later, having failed alone.
        """
        for number in STOP_SIGNALS:  # torchrun's, once another rank has failed: go at once
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger(__name__).info("this rank failed: %s", message)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._folder is not None:
            try:
                failure_marker(self._folder).touch(exist_ok=False)
            except FileExistsError:
                os._exit(code)
            except OSError:  # a full disk, a deleted folder: that may be the very message
                pass
        elif self.rank != 0:
            time.sleep(5)
        prefix = f"rank {self.rank}: " if self.rank else ""
        with suppress(OSError):  # nobody reads it
            os.write(self._terminal, f"{prefix}{message.rstrip()}\n".encode(errors="backslashreplace"))
        os._exit(code)

    @staticmethod
    def end(code: int) -> None:
        """End this process with the code that is decided, whatever the engine's destructors would do at a normal exit."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LogFile(logging.FileHandler):
    """A record that a full disk does not take is lost, without a traceback on the terminal for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
