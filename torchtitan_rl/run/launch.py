"""torchrun with a watchdog: names the rank that died, hangs or is slow, and leaves no process behind.

python -m torchtitan_rl.run.launch --nproc_per_node=8 -m torchtitan_rl.train --config debug

A second Ctrl-C ends the job at once. Exit codes: those of torchtitan_rl.train; 128 + N if a rank or the run was ended by signal
N; 75 if SIGUSR1 or SIGUSR2 (a batch system's time limit) stopped the run after a checkpoint, and the same command continues it;
1 if the watchdog ended a hung job.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchtitan_rl.left_processes import find_marked, kill_marked
from torchtitan_rl.run import job_processes, out_of_memory
from torchtitan_rl.run.checkpoint_folder import CheckpointFolder
from torchtitan_rl.run.job_processes import WATCH_VARIABLE
from torchtitan_rl.run.rank_output import failure_marker
from torchtitan_rl.run.rank_status import RankStatus, name_ranks, read_statuses, stragglers
from torchtitan_rl.run.run_end import ensure_report, write_end
from torchtitan_rl.run.watchdog import Watchdog, stack_of

REQUEUE = 75
POLL_EVERY_S = 0.2
WATCH_EVERY_S = 1.0
PAUSED_S = 10.0
"""Seconds between two looks at the job, a fifth of a second apart if it runs, that mean that it was stopped meanwhile."""
FIRST_WAIT_NOTICE_S = 10.0
GRACE_S = 8.0
"""Seconds that a node's other ranks have to end by themselves after one has died."""


class Launcher:
    """One node's part of a job: torchrun's agent, the ranks that it starts, and their last known status."""

    def __init__(self, args: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torchtitan_rl-"))
        self.mark = f"{WATCH_VARIABLE}={self.folder}"
        self.watchdog = Watchdog(self.folder, say)
        self.oom_detector = out_of_memory.OomDetector()
        self.stop_signal = 0
        """The first signal that asked the job to end; 0 if there was none."""
        self._stop_requested_at = 0.0
        self.hung_reason = ""
        """Why the watchdog ended the job."""
        self._hung: list[RankStatus] = []
        """The first rank that held up the others then."""
        self._hung_at = ""
        """Its stack, for end.json."""
        self._waits_for_nodes = any(arg.startswith("--nnodes") for arg in args)
        self._next_wait_notice_s = FIRST_WAIT_NOTICE_S
        self._last_status: dict[int, RankStatus] = {}  # by process id
        self._peak_bytes: dict[int, int] = {}
        self._died_at: dict[int, float] = {}
        job_processes.start_reaper(self.folder)
        environment = {**os.environ, WATCH_VARIABLE: str(self.folder)}
        command = [sys.executable, "-m", "torchtitan_rl.run.agent", *by_address(args)]
        # In its own session, so that the ranks get a terminal's Ctrl-C once, from here.
        self.agent = subprocess.Popen(command, env=environment, start_new_session=True)
        for number in job_processes.stop_signals():
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Watch the job until the agent has ended. Prints why it failed, if it did; returns the exit code."""
        began, watched = time.monotonic(), 0.0
        looked = began
        while self.agent.poll() is None:
            self._check_exits()
            now = time.monotonic()
            if now - looked > PAUSED_S:
                self.watchdog.resume(now)
            looked = now
            if now - watched > WATCH_EVERY_S:
                watched = now
                self._report_waiting(now - began)
                if (reason := self.watchdog.check(now)) and not self.hung_reason:
                    self._kill_hung_job(reason)
            time.sleep(POLL_EVERY_S)
        self._check_exits()
        code, why = self._exit_code_and_reason(self.agent.returncode)
        if why:
            say(why)
        self._record_end(code, why)
        if code not in (0, REQUEUE) and not self.stop_signal:
            self.watchdog.publish_end(why or self.hung_reason or f"it ended with code {code}")
        return code

    def close(self) -> None:
        """Kill the job's remaining processes and remove the folder with their statuses."""
        kill_marked(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop_signal and now - self._stop_requested_at < job_processes.SAME_REQUEST_S:
            return
        if self.stop_signal:
            say("stopped at once; earlier checkpoints are whole")
            self.agent.kill()
            self.close()
            self._record_end(
                128 + self.stop_signal, f"{signal.Signals(number).name} twice: stopped at once"
            )
            os._exit(128 + self.stop_signal)
        self.stop_signal, self._stop_requested_at = number, now
        if not self._last_status and not job_processes.children(self.agent.pid):
            self.agent.kill()  # it waits for other nodes, in a call that no signal interrupts
        if ranks := [status.pid for status in read_statuses(self.folder)]:
            for pid in ranks:
                job_processes.send_signal(pid, number)
            return
        for pid in find_marked(self.mark):  # still importing: SIGINT would print a traceback there
            job_processes.send_signal(pid, signal.SIGTERM)

    def _check_exits(self) -> None:
        """Record which ranks died and when. Tell the others by the marker file, and kill them if they do not end themselves.

        A rank that waits in NCCL for a dead one does not notice it, and torchrun accepts a rank that ended with code 0.
        """
        now = time.monotonic()
        here = read_statuses(self.folder)
        for status in here:
            self._last_status[status.pid] = status
            self._peak_bytes[status.pid] = job_processes.peak_bytes(
                status.pid
            ) or self._peak_bytes.get(status.pid, 0)
            if status.pid not in self._died_at and not job_processes.is_alive(status.pid):
                self._died_at[status.pid] = now
                if not status.outcome:
                    _mark_failed(status.run_folder)
        early = [at for pid, at in self._died_at.items() if not self._last_status[pid].outcome]
        if early and now - min(early) > GRACE_S:
            for status in here:
                job_processes.send_signal(status.pid, signal.SIGKILL)

    def _report_waiting(self, waited: float) -> None:
        """Say, at growing intervals, that torchrun starts no rank until all nodes are there."""
        if (
            self._waits_for_nodes
            and not self._last_status
            and waited > self._next_wait_notice_s
            and not job_processes.children(self.agent.pid)
        ):
            self._next_wait_notice_s = 2 * waited
            say(
                f"no rank is started yet after {waited:.0f} s: torchrun waits for the same command on the other nodes"
            )

    def _exit_codes(self) -> dict[int, int]:
        """Exit codes of failed ranks by process id, negative for a signal, as the agent reports them."""
        file = self.folder / "failures.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {entry["pid"]: entry["exitcode"] for entry in map(json.loads, lines)}

    def _kill_hung_job(self, reason: str) -> None:
        statuses = read_statuses(self.folder)
        running = [
            status
            for status in statuses
            if not status.outcome and job_processes.is_alive(status.pid)
        ]
        self.hung_reason, self._hung = reason, stragglers(running)[:1]
        self._hung_at = "".join(
            f"\nRank {status.rank} is at:\n{stack_of(status, self.folder)}" for status in self._hung
        )
        say(f"watchdog: {reason}; the job is ended")
        for status in statuses:
            job_processes.send_signal(status.pid, signal.SIGKILL)

    def _exit_code_and_reason(self, agent_code: int) -> tuple[int, str]:
        """The launcher's exit code, and the reason if no rank has printed it."""
        outcomes = {status.outcome for status in self._last_status.values()}
        if agent_code in (2, 3):
            return agent_code, ""  # as the agent or a rank has said
        if outcomes and "" not in outcomes:
            return _stop_exit_code(
                max((int(outcome) for outcome in outcomes - {"done"}), default=0)
            ), ""
        if self.hung_reason:
            return 1, ""
        if self.stop_signal and outcomes <= {""} and self._was_only_stopped():
            name = signal.Signals(self.stop_signal).name
            return 128 + self.stop_signal, f"{name} before the first step: nothing new is saved"
        if agent_code < 0:
            why = self.oom_detector.explain(-agent_code)
            return 128 - agent_code, f"torchrun's agent was {why} The ranks ended with it."
        pid, code = self._first_exit()
        if pid not in self._last_status:  # another program, or nothing was started
            return agent_code, ""
        if code > 0:
            return code, ""
        resume = _how_to_resume(self._last_status[pid].run_folder)
        return 128 - code if code else 1, f"{self._describe(pid, code)} {resume}"

    def _was_only_stopped(self) -> bool:
        """Whether the signal came before the first step and ended the ranks, and not an error that a rank has printed."""
        codes = set(self._exit_codes().values())
        failed = codes & {2, 3} or (1 in codes and -self.stop_signal not in codes)
        return not failed and not any(
            status.phase.startswith("step ") for status in self._last_status.values()
        )

    def _record_end(self, code: int, why: str) -> None:
        """Write how the run ended where no rank could, and its report."""
        folders = {status.run_folder for status in self._last_status.values()} - {""}
        for folder in map(Path, folders):
            if code:
                outcome = (
                    "hung" if self.hung_reason else "stopped" if self.stop_signal else "killed"
                )
                status = (
                    self._hung[0] if self._hung else self._last_status.get(self._first_exit()[0])
                )
                where = (
                    {"rank": status.rank, "phase": status.phase}
                    if status and outcome != "stopped"
                    else {}
                )
                message = (
                    why or self.hung_reason + self._hung_at or f"the job ended with code {code}"
                )
                write_end(folder, outcome, message, code=code, **where)
            ensure_report(folder)

    def _first_exit(self) -> tuple[int, int]:
        """(process id, exit code, negative for a signal) of the rank that died first, of those that did not end as planned.

        Of the ranks that died within a second of it, one that was killed comes before those that failed because of it.
        """
        codes = self._exit_codes()
        died = {pid: at for pid, at in self._died_at.items() if not self._last_status[pid].outcome}
        early = (
            [pid for pid, at in died.items() if at <= min(died.values()) + 1.0]
            or list(codes)
            or [0]
        )
        return min(
            ((pid, codes.get(pid, 0)) for pid in early),
            key=lambda pid_and_code: _cause_order(pid_and_code[1]),
        )

    def _describe(self, pid: int, code: int) -> str:
        status = self._last_status.get(pid)
        who = f"{name_ranks([status])} in {status.phase}" if status else f"process {pid}"
        if code >= 0:
            return f"{who} ended with code {code} before the end of training."
        return (
            f"{who} was {self.oom_detector.explain(-code, peak_bytes=self._peak_bytes.get(pid, 0))}"
        )


def _cause_order(code: int) -> int:
    """Sort key of exit codes, likeliest cause first: killed, vanished, stopped with a message, failed, ended by torchrun."""
    if code == -signal.SIGTERM:
        return 4
    return 0 if code < 0 else {0: 1, 1: 3}.get(code, 2)


def _mark_failed(run_folder: str) -> None:
    if run_folder and Path(run_folder).is_dir():
        marker = failure_marker(Path(run_folder))
        marker.parent.mkdir(exist_ok=True)
        marker.touch()


def _how_to_resume(run_folder: str) -> str:
    """The run's newest checkpoint and the command that continues from it."""
    if not run_folder:
        return "It had no run folder yet: the same command starts a new run."
    newest = CheckpointFolder(Path(run_folder)).newest()
    goes_on = (
        f"goes on after {newest.name}" if newest else "starts a new run, as no checkpoint was saved"
    )
    return f"The same command with --dump-folder {run_folder} {goes_on}."


def _stop_exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped after a checkpoint; 0 for no signal."""
    if number == 0:
        return 0
    return REQUEUE if number in (signal.SIGUSR1, signal.SIGUSR2) else 128 + number


def by_address(args: list[str]) -> list[str]:
    """Returns torchrun's arguments with `--standalone` written out, so that ranks meet at an address. torchrun would take the
    name localhost and, for the ranks, that of the host, which may not resolve."""
    if "--standalone" not in args:
        return args
    at = args.index("--standalone")
    here = [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=127.0.0.1:0",
        f"--rdzv_id={uuid.uuid4()}",
        "--local_addr=127.0.0.1",
    ]
    return [*args[:at], *here, *args[at + 1 :]]


def say(text: str) -> None:
    """Print a line of the launcher to stderr. If nobody reads it, the job continues."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def find_installed_programs() -> None:
    """Append the environment's programs to PATH: FlashInfer compiles only if it finds ninja there."""
    os.environ["PATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PATH"), sysconfig.get_path("scripts")])
    )


def main() -> None:
    """Launch torchrun's command line and exit with the job's exit code."""
    find_installed_programs()
    if any(arg.replace("_", "-").startswith("--max-restarts") for arg in sys.argv[1:]):
        sys.exit(
            "error: --max-restarts: expected none. Start the same command again: it goes on from the last checkpoint."
        )
    # By default OpenMP's threads spin while they wait. If another process wants the cores, they then keep the thread that they
    # wait for from running, and small operations take six times as long. PASSIVE lets them sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    launcher = Launcher(sys.argv[1:])
    try:
        code = launcher.run()
    finally:
        launcher.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
