"""Entry point of every rank: `torchrun -m torchtitan_rl.command.train --config NAME [--dotted.overrides]`.

Exit codes: 0 if the run is done, or was stopped by a signal and saved (the launcher then exits with 128 + N or 75); 1 after an
unforeseen error, with a traceback; 2 for wrong input, with a message; 3 if training stopped itself (NaN, or trainer and sampler
disagree), with a message. The last checkpoint is kept.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Before the first step Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # looking for garbage takes a sixth of the time of the imports

from torchtitan_rl import device, events  # noqa: F401  (first: its effects must precede torchtitan and vLLM)
from torchtitan_rl.comm import be_only_rank, broadcast, is_rank_0
from torchtitan_rl.errors import TrainingStopped, UserError
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.observe.terminal import Terminal
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.job_processes import die_with_parent
from torchtitan_rl.run.rank_output import RankLog, RankOutput
from torchtitan_rl.run.rank_status import StatusFile, mark_failed, rank_failed, slowest
from torchtitan_rl.run.run_end import advice, phase_of, write_end, write_run_report
from torchtitan_rl.run.stop_signal import StopSignal

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.controller import Controller
    from torchtitan_rl.generator_rank import GeneratorRank

WRONG_INPUT, STOPPED = 2, 3
LOST_S = 2.0
"""Seconds after an error in which another rank may turn out to have ended first."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line's training as one of torchrun's ranks, or without torchrun as the only rank."""
    be_only_rank()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    status_file = StatusFile(int(os.environ["RANK"]))
    events.listen(status_file)
    output = RankOutput(rank=int(os.environ["RANK"]), shown_rank=os.environ.get("LOG_RANK", "0"))

    try:
        output.check_shown_rank(int(os.environ["WORLD_SIZE"]))
        from torchtitan_rl.command.registry import parse_args

        # Only parse_args may exit: for --help, --list-configs and unknown options.
        name, config = parse_args(sys.argv[1:] if args is None else args)
        try:
            cleanup = ExitStack()
            train_run(name, config, output, status_file, cleanup)
            cleanup.close()  # after an error the process ends without it: a lost rank would be waited for
        except SystemExit as request:  # for example in a reward function: the run is not done
            called = f"sys.exit({request.code!r})"
            raise RuntimeError(f"something called {called} in the middle of the run") from request
    except SystemExit as ended:
        if ended.code:
            mark_failed()  # as the parser has said
        else:
            status_file.set_outcome("done")
        raise
    except BaseException as error:  # CheckpointException and KeyboardInterrupt are no Exceptions
        if _lost_another_rank(error):
            logging.getLogger(__name__).info("lost another rank", exc_info=True)
            output.end(1)
        if status_file.status.run_folder:
            write_failure(error, Path(status_file.status.run_folder))
        output.fail(*_message_and_code(error))
    output.end(0)


def _lost_another_rank(error: BaseException) -> bool:
    """Whether an error most likely only says that another rank of this node is gone, as gloo's and NCCL's do.

    That rank, or the launcher, says why. Waits a moment for it: the connection may break before the other process has ended.
    """
    if not isinstance(error, RuntimeError) or os.environ["WORLD_SIZE"] == "1":
        return False
    deadline = time.monotonic() + LOST_S
    while not rank_failed() and time.monotonic() < deadline:
        time.sleep(0.1)
    return rank_failed()


def _message_and_code(error: BaseException) -> tuple[str, int]:
    """Returns the message for the terminal and end.json about the error that ends the run, and the exit code."""
    if isinstance(error, UserError):
        return f"error: {error}", WRONG_INPUT
    if isinstance(error, TrainingStopped):
        return f"stopped: {error}", STOPPED
    if isinstance(error, KeyboardInterrupt):  # raised by the user's code, not by Ctrl-C
        return f"interrupted{users_line(error)}", 128 + signal.SIGINT
    lines = [traceback.format_exc().rstrip(), *advice(error)]
    if isinstance(error, RuntimeError) and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        lines.append("If a rank of another node ended first, that node's output says why.")
    return "\n".join(lines), 1


def train_run(
    name: str, config: "RunConfig", output: RankLog, status_file: StatusFile, cleanup: ExitStack
) -> Path:
    """Train, resume or evaluate the run of a config. Collective. Returns the run's folder.

    Args:
        name: the config's name, from which a new folder gets its own.
        cleanup: gets what gives the process back as it was: it ends the engine and restores signals.
    """
    status_file.limits = config.watchdog
    cleanup.callback(events.listen(Terminal(slowest=slowest)))
    with events.phase("import torchtitan and transformers"):
        from torchtitan_rl.build import build_run, prepare
        from torchtitan_rl.run.resume import agreed_fields, choose_resume
        from torchtitan_rl.run.run_folder import FolderTaken, RunFolder
    gc.enable()
    resolved = prepare(config)
    config, fields = resolved.config, agreed_fields(resolved.config, resolved.algorithm)
    folder = RunFolder.claim(config.dump_folder, name)
    cleanup.callback(folder.close)
    keeps_record = config.eval_only and folder.continues  # what the run has recorded stays
    resume = broadcast(choose_resume(config, fields, folder.path) if is_rank_0() else None)
    output.to_file(folder.path)
    status_file.update(run_folder=str(folder.path), keeps_record=keeps_record)
    if not folder.continues:
        folder.begin(name, config, resume)
    try:
        stop = StopSignal()
        cleanup.callback(stop.restore)
        controller = build_run(
            config, folder.path, resolved=resolved, resume=resume, stop_requested=stop.requested
        )
        cleanup.callback(close_parts, controller)
        if not keeps_record:
            folder.begin(name, config, resume)
        stopped = _carry_out(controller, folder.path)
    except BaseException as error:
        refused = isinstance(error, UserError) and not folder.has_begun
        if keeps_record or refused or isinstance(error, FolderTaken):
            status_file.update(run_folder="")  # what another start has left there stays
        elif os.environ["RANK"] == "0":
            folder.begin(name, config, resume)
        raise
    status_file.set_outcome(str(stopped) if stopped else "done")
    stop.effect = "training has ended, only the report is being written"
    if not keeps_record and os.environ["RANK"] == "0":
        write_outcome(controller, folder.path, stopped)
        write_run_report(folder.path)
    return folder.path


def _carry_out(controller: "Controller | GeneratorRank", run_folder: Path) -> int:
    """Train or evaluate, or sample for the ranks that do. Returns the number of the signal that stopped training, or 0."""
    from torchtitan_rl.generator_rank import GeneratorRank
    from torchtitan_rl.observe.evaluation_results import print_results, results_folder

    try:
        if isinstance(controller, GeneratorRank):
            return controller.run()
        if not controller.config.eval_only:
            stopped = controller.run()
            if not stopped:
                controller.observer.check_rewarded()
            return stopped
        controller.evaluate_only()
        print_results(results_folder(run_folder, alone=True), controller.state.step)
        return 0
    except BaseException:
        controller.observer.close()  # the metrics recorded so far help to find the cause
        if controller.generator.environments is not None:
            controller.generator.environments.close()  # a command of theirs would outlive the run
        raise


def write_failure(error: BaseException, run_folder: Path) -> None:
    """Write to end.json that an error ends the run and, on rank 0, the report."""
    message, code = _message_and_code(error)
    outcome = "stopped" if code == STOPPED else "failed"
    rank, brief, phase = int(os.environ["RANK"]), _brief(error), phase_of(error)
    write_end(run_folder, outcome, message, error=brief, code=code, rank=rank, phase=phase)
    if rank == 0:
        write_run_report(run_folder)


def _brief(error: BaseException) -> str:
    """The error without a traceback, and what else to read first."""
    if isinstance(error, (UserError, TrainingStopped)):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return ""
    lines = [line.rstrip() for line in traceback.format_exception_only(error)]
    return "\n".join([*lines, *advice(error)])


def write_outcome(controller: "Controller", run_folder: Path, stopped: int) -> None:
    """Report the end of a run without an error, and write it to end.json. On rank 0."""
    config, step = controller.config, controller.state.step
    outcome, message, code = ("evaluated" if config.eval_only else "done"), "", 0
    if stopped:
        outcome, code = "stopped", 128 + stopped
        goes_on = "nothing is saved"
        if step >= config.num_steps:
            goes_on = "all its steps are done"
        elif CheckpointFolder(run_folder).newest():
            goes_on = f"the same command with --dump-folder {run_folder} goes on"
        message = f"{signal.Signals(stopped).name} after step {step}; {goes_on}"
        events.progress(f"stopped by {message}")
    elif controller.evaluation.gives_up:
        message = f"evaluation.stop_after: {config.evaluation.best_by} stopped improving before step {step}"
        events.progress(f"{message}; raise stop_after to continue")
    write_end(run_folder, outcome, message, code=code)


def close_parts(controller: "Controller") -> None:
    """Close a finished run. Its last checkpoint is saved, so an error in the teardown must not make it look failed."""
    try:
        controller.close()
    except Exception:
        fault = "the run is complete and saved, but its teardown failed"
        logging.getLogger(__name__).warning(fault, exc_info=True)


if __name__ == "__main__":
    main()
