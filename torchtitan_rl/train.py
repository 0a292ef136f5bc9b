"""Entry point of every rank: `torchrun -m torchtitan_rl.train --config NAME [--dotted.overrides]`.

Exit codes: 0 done, or stopped by a signal and saved (the launcher makes 128 + N or 75 of it); 2 wrong input, with a message; 3 training stopped itself (NaN, or trainer and sampler disagree), with a
message and the last checkpoint kept; 1 anything unforeseen, with a traceback.
"""

import logging
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl import device  # noqa: F401  (first: its effects must precede torchtitan and vLLM)
from torchtitan_rl.observability.printed import keep_streams
from torchtitan_rl.run.board import Board, heartbeat_text
from torchtitan_rl.run.errors import TrainingStopped, UserError
from torchtitan_rl.run.processes import die_with_parent
from torchtitan_rl.run.rank_output import RankOutput

if TYPE_CHECKING:
    from torchtitan_rl.controller import Controller

WRONG_INPUT, STOPPED = 2, 3


def main(args: Sequence[str] | None = None) -> None:
    """Run the training that the command line names, as one of torchrun's ranks or, without torchrun, as the only one."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**single, "MASTER_PORT": str(_free_port())}.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a step to finish: an end, not a traceback
    output = RankOutput(rank=int(os.environ["RANK"]), shown_rank=os.environ.get("LOG_RANK", "0"))
    keep_streams()
    try:
        output.check_shown_rank(int(os.environ["WORLD_SIZE"]))
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
    except SystemExit:
        raise
    except BaseException as error:  # torch's CheckpointException and a reward's KeyboardInterrupt are no Exceptions
        output.fail(_last_words(error), 1)
    output.end(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_words(error: BaseException) -> str:
    """What the terminal gets of an unforeseen error: its traceback, or one line when it only tells that another rank is gone."""
    from torchtitan_rl import comm

    if not comm.lost_a_rank(error):
        return "\n".join([traceback.format_exc().rstrip(), *_users_line(error)])
    logging.getLogger(__name__).info("lost another rank", exc_info=True)  # whole in the rank's log
    return "this rank lost another one and ends"


def _users_line(error: BaseException) -> list[str]:
    """Where the traceback was last in a file of the user's own: a config, a task or a reward function; [] for nowhere."""
    not_theirs = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    told = [trace for e in (error, error.__cause__) if e for trace in traceback.extract_tb(e.__traceback__)]
    frames = [frame for frame in told if not frame.filename.startswith(not_theirs)]
    return [f"The last line of your own code in it: {frames[-1].filename}, line {frames[-1].lineno}"] if frames else []


def _train(name: str, config: "Controller.Config", output: RankOutput) -> None:
    from torchtitan_rl import comm
    from torchtitan_rl.controller import Controller
    from torchtitan_rl.observability.progress import follow, heartbeat, timed
    from torchtitan_rl.run.folder import RunFolder
    from torchtitan_rl.run.resume import prepare_resume
    from torchtitan_rl.run.start import prepare_start
    from torchtitan_rl.run.validation import check_model, validate

    board = Board(int(os.environ["RANK"]))
    limits = config.watchdog
    board.update(notice_s=limits.notice_seconds, limit_s=limits.limit_seconds)
    follow(board.enter, heartbeat_text)
    world_size = int(os.environ["WORLD_SIZE"])
    validate(config, world_size=world_size)
    prepare_start(config)
    check_model(config, world_size=world_size)
    with heartbeat("start"), timed("wait for the other ranks"):
        comm.init_process_group(config.comm)
    folder = RunFolder.claim(config.dump_folder, name)
    output.to_file(folder.path)
    board.update(run_folder=str(folder.path))
    resume = prepare_resume(config, folder.path)
    folder.describe(name, config)
    controller = Controller(config, run_folder=folder.path, run_name=folder.path.name, resume=resume)
    try:
        stopped = controller.run()
    except BaseException:
        controller.recorder.close()  # what was measured so far says why
        raise
    board.update(outcome=str(stopped) if stopped else "done")
    _close(controller)


def _close(controller: "Controller") -> None:
    """End a finished run: from here on, with its last checkpoint saved, no failing teardown may make it look failed."""
    try:
        controller.close()
    except Exception:
        logging.getLogger(__name__).warning("the run is complete and saved, but its teardown failed", exc_info=True)


if __name__ == "__main__":
    main()
