"""Entry point of every rank: `torchrun -m torchtitan_rl.train --config NAME [--dotted.overrides]`.

Exit codes: 0 done; 2 wrong input, with a message; 3 training stopped itself (NaN, or trainer and sampler disagree), with a
message and the last checkpoint kept; 1 anything unforeseen, with a traceback.
"""

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl import device  # noqa: F401  (its effects must precede torchtitan and vLLM)
from torchtitan_rl.run.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from torchtitan_rl.controller import Controller

WRONG_INPUT, STOPPED = 2, 3


def main(args: Sequence[str] | None = None) -> None:
    """Run the training that the command line names, as one of torchrun's ranks or, without torchrun, as the only one."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    _log_to_terminal()
    output = RankOutput(rank=int(os.environ["RANK"]), shown_rank=int(os.environ.get("LOG_RANK", "0")))
    try:
        from torchtitan_rl.run.registry import parse_args

        # Exits for --help, --list-configs and unknown options; nothing after it may.
        name, config = parse_args(sys.argv[1:] if args is None else args)
        try:
            _train(name, config, output)
        except SystemExit as request:  # a reward function's, say: the run is not done
            raise RuntimeError(f"something called sys.exit({request.code!r}) in the middle of the run") from request
    except UserError as error:
        output.fail(f"error: {error}", WRONG_INPUT)
    except TrainingStopped as error:
        output.fail(f"stopped: {error}", STOPPED)
    except Exception:
        output.fail(traceback.format_exc(), 1)
    output.end(0)


def _train(name: str, config: "Controller.Config", output: "RankOutput") -> None:
    from torchtitan_rl import comm
    from torchtitan_rl.controller import Controller
    from torchtitan_rl.run.folder import RunFolder
    from torchtitan_rl.run.validation import prepare_start, validate

    validate(config, world_size=int(os.environ["WORLD_SIZE"]))
    prepare_start(config)
    comm.init_process_group(config.comm)
    folder = RunFolder.claim(config.dump_folder, name)
    output.to_file(folder.path)
    folder.describe(name, config)
    controller = Controller(config, run_folder=folder.path, run_name=folder.path.name)
    try:
        controller.run()
    except BaseException:
        controller.recorder.close()  # what was measured so far says why
        raise
    _close(controller)


def _close(controller: "Controller") -> None:
    """End a finished run: from here on, with its last checkpoint saved, no failing teardown may make it look failed."""
    try:
        controller.close()
    except Exception:
        logging.getLogger(__name__).warning("the run is complete and saved, but its teardown failed", exc_info=True)


def _log_to_terminal() -> None:
    """This project's warnings, and only errors of the libraries; `RankOutput.to_file` keeps the rest."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.startswith("torchtitan_rl"))
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("torch.distributed.tensor").setLevel(
        logging.ERROR
    )  # torch prints these itself: advice on layouts


class RankOutput:
    """Whose output reaches the terminal: one rank's; the others write to a file of their own in the run folder.

    Every rank's log records, libraries' included, are in that file.
    """

    def __init__(self, *, rank: int, shown_rank: int) -> None:
        self.rank = rank
        self.shown = rank == shown_rank
        self._terminal = os.dup(2)
        self._folder: Path | None = None
        if not self.shown:
            self._redirect(os.devnull)

    def to_file(self, run_folder: Path) -> None:
        """Keep log records in `run_folder`/logs/rank_N.log, and there the whole output of a hidden rank."""
        self._folder = run_folder
        path = run_folder / "logs" / f"rank_{self.rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
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
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun's, once another rank has failed: go at once
            signal.signal(number, signal.SIG_DFL)
        logging.getLogger(__name__).info("this rank failed: %s", message)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._folder is not None:
            if not self._is_first_to_fail(self._folder):
                os._exit(code)
        elif self.rank != 0:
            time.sleep(5)
        prefix = f"rank {self.rank}: " if self.rank else ""
        os.write(self._terminal, f"{prefix}{message.rstrip()}\n".encode())
        os._exit(code)

    @staticmethod
    def end(code: int) -> None:
        """End this process with the code that is decided, whatever the engine's destructors would do at a normal exit."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @staticmethod
    def _is_first_to_fail(run_folder: Path) -> bool:
        from torchtitan_rl.run.folder import failure_marker

        try:
            failure_marker(run_folder).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


if __name__ == "__main__":
    main()
