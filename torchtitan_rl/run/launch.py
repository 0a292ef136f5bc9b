"""torchrun with a sentence for each end: which rank died, how, and how to go on. No process is left behind.

python -m torchtitan_rl.run.launch --nproc_per_node=8 -m torchtitan_rl.command.train --config debug

torchrun starts and ends the ranks. Beside it the watchdog names ranks that stand still. A second Ctrl-C ends the job at once. Exit
codes: those of torchtitan_rl.command.train; 128 + N if a rank or the run was ended by signal N; 75 if SIGUSR1 or SIGUSR2 (a batch system's
time limit) stopped the run after a checkpoint, and the same command continues it; 1 if the watchdog ended a hung job.
"""

import logging
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import uuid
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchtitan_rl.run import job_processes
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.rank_status import (
    CHANGES_PER_STEP,
    WATCH_VARIABLE,
    RankStatus,
    failure_marker,
    has_vanished,
    named,
    read_statuses,
)
from torchtitan_rl.run.run_end import MEMORY_REMEDY, has_report, write_end, write_run_report
from torchtitan_rl.run.watchdog import Watchdog

REQUEUE = 75
LOOK_EVERY_S = 1.0
WAIT_NOTICE_S = 10.0
MEETING = (
    "Start the same command on every node, with the same NNODES, MASTER_ADDR and MASTER_PORT (another one if a program uses it), and "
    "with another NODE_RANK on each."
)


class Job:
    """One node's part of a job: torchrun in a thread, the watchdog, and the stop signals for the ranks."""

    def __init__(self, args: list[str]) -> None:
        self._args = args
        self._folder = Path(tempfile.mkdtemp(prefix="torchtitan_rl-"))
        os.environ[WATCH_VARIABLE] = str(self._folder)
        self._watchdog = Watchdog(self._folder, say)
        self._error: BaseException | None = None
        """What torchrun raised."""
        self._stop_signal, self._stopped_at = 0, 0.0
        """The first signal that asked the job to end, 0 if there was none, and its time."""
        job_processes.adopt_orphans()
        for number in job_processes.stop_signals():
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Run torchrun to its end. Says why the job failed, if no rank has; returns the exit code."""
        torchrun = threading.Thread(target=self._torchrun, daemon=True)
        torchrun.start()
        began, may_wait = time.monotonic(), any(arg.startswith("--nnodes") for arg in self._args)
        while torchrun.is_alive():
            torchrun.join(LOOK_EVERY_S)
            now = time.monotonic()
            self._watchdog.look(now)
            if may_wait and now - began > WAIT_NOTICE_S:
                may_wait = False
                if not job_processes.children() and not read_statuses(self._folder):
                    say("no rank is started yet: torchrun waits for the same command on the other nodes")  # fmt: skip
        code, why, status = self._how_it_ended()
        if why:
            say(why)
        return self._end(code, why, status)

    def _torchrun(self) -> None:
        try:
            from torch.distributed.run import parse_args, run

            logger = logging.getLogger("torch.distributed.elastic")
            logger.setLevel(logging.CRITICAL + 1)  # this class says which rank failed
            parsed = parse_args(self._args)
            if parsed.standalone:  # by address: torchrun takes names, which may not resolve
                parsed.standalone, parsed.rdzv_backend = False, "c10d"
                parsed.rdzv_endpoint, parsed.local_addr = "127.0.0.1:0", "127.0.0.1"
                parsed.rdzv_id = str(uuid.uuid4())
            run(parsed)
        except BaseException as error:
            self._error = error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_signal and now - self._stopped_at < job_processes.SAME_REQUEST_S:
            return
        name, statuses = signal.Signals(number).name, read_statuses(self._folder)
        if self._stop_signal:
            text = f"{name} twice: stopped at once; earlier checkpoints are whole"
        elif not any(status.changes >= CHANGES_PER_STEP for status in statuses):
            text = f"{name} before the first step: nothing new is saved"
        else:
            self._stop_signal, self._stopped_at = number, now
            for status in statuses:
                job_processes.send_signal(status.pid, number)
            return
        self._stop_signal = self._stop_signal or number
        say(text)
        job_processes.kill_children()
        os._exit(self._end(128 + self._stop_signal, text, None))

    def _how_it_ended(self) -> tuple[int, str, RankStatus | None]:
        """The exit code, the reason if it is not printed yet, and the status of the rank that it is about."""
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        statuses, failures = read_statuses(self._folder), []
        if statuses and all(status.outcome for status in statuses):
            return max(map(_planned_exit_code, statuses)), "", None
        if isinstance(self._error, ChildFailedError):  # without ranks that ended with code 0
            failures = list(self._error.failures.values())
        elif isinstance(self._error, (DistError, RendezvousError)) and not statuses:
            return 2, f"error: the nodes did not meet ({self._error}). {MEETING}", None
        elif isinstance(self._error, SystemExit):  # as argparse has said
            return self._error.code, "", None
        elif self._error:
            return 1, "".join(traceback.format_exception(self._error)), None
        if self._watchdog.hung:
            return 1, "", self._watchdog.hung
        codes = {failure.pid: failure.exitcode for failure in failures}
        vanished = {status.pid: status for status in statuses if has_vanished(status)}
        for pid, status in vanished.items():
            if pid not in codes:
                return 1, _vanished(status, 0), status
        if not failures:
            return 0, "", None
        # The likeliest cause: not ended by torchrun, early, killed, ended with a message.
        first = min(failures, key=lambda failure: (failure.exitcode == -signal.SIGTERM, failure.timestamp, failure.exitcode > 0, failure.exitcode == 1))  # fmt: skip
        status = vanished.get(first.pid)
        if first.exitcode > 0 and status and not failure_marker().exists():
            return 1, _vanished(status, first.exitcode), status
        if first.exitcode > 0:
            return first.exitcode, "", status
        return 128 - first.exitcode, _killed(-first.exitcode, status), status

    def _end(self, code: int, why: str, status: RankStatus | None) -> int:
        """Write how the run ended where no rank could, and its report; end what ranks have left behind. Returns `code`."""
        outcome = "stopped" if self._stop_signal else "killed" if code > 128 else "failed"
        if self._watchdog.hung:
            outcome, why = "hung", self._watchdog.reason
        where = {"rank": status.rank, "phase": status.phase} if status else {}
        statuses = read_statuses(self._folder)
        for folder in {each.run_folder for each in statuses if not each.keeps_record} - {""}:
            if code:
                why = why or f"the job ended with code {code}"
                write_end(Path(folder), outcome, why, code=code, **where)
            if not has_report(Path(folder)):
                write_run_report(Path(folder))
        job_processes.kill_children()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code


def _vanished(status: RankStatus, code: int) -> str:
    """Which rank has ended by itself, without a word: something in it has called exit."""
    return f"{named([status])} in {status.phase} ended with code {code} before the end of training."


def _killed(number: int, status: RankStatus | None) -> str:
    """Which rank a signal ended, why most likely, and how to go on."""
    who = f"{named([status])} in {status.phase}" if status else "a rank"
    name, cause = str(number), ""
    with suppress(ValueError):  # most real-time signals have no name
        name = f"{number} ({signal.Signals(number).name})"
    if number == signal.SIGKILL:
        cause = f", mostly because memory ran out. {MEMORY_REMEDY.removesuffix('.')}"
    again = "It had no run folder yet: the same command starts a new run."
    if status and status.run_folder:
        newest = CheckpointFolder(Path(status.run_folder)).newest()
        effect = f"goes on after {newest.name}" if newest else "starts a new run: none was saved"
        again = f"The same command with --dump-folder {status.run_folder} {effect}."
    return f"{who} was killed by signal {name}{cause}. {again}"


def _planned_exit_code(status: RankStatus) -> int:
    """The exit code of a run that ended as planned, or that a signal stopped. Without a checkpoint it is not to be queued again."""
    if status.outcome == "done":
        return 0
    number = int(status.outcome)
    newest = CheckpointFolder(Path(status.run_folder)).newest()
    may_requeue = newest and number in (signal.SIGUSR1, signal.SIGUSR2)
    return REQUEUE if may_requeue else 128 + number


def say(text: str) -> None:
    """Print a line of the launcher to stderr. If nobody reads it, the job continues."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Launch torchrun's command line. Returns the job's exit code."""
    if any(arg.replace("_", "-").startswith("--max-restarts") for arg in arguments):
        again = "Start the same command again: it goes on from the last checkpoint."
        sys.exit(f"error: --max-restarts: expected none. {again}")
    # FlashInfer compiles only if it finds the environment's ninja.
    programs = [os.environ.get("PATH"), sysconfig.get_path("scripts")]
    os.environ["PATH"] = os.pathsep.join(filter(None, programs))
    # By default OpenMP's threads spin while they wait. If another process wants the cores, they then keep the thread that they
    # wait for from running, and small operations take six times as long. PASSIVE lets them sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return Job(arguments).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
