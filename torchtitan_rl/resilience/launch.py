"""torchrun, watched: who died, hangs or is slow is said by rank, a second Ctrl-C ends at once, and nothing outlives the launcher.

python -m torchtitan_rl.resilience.launch --nproc_per_node=8 -m torchtitan_rl.train --config debug

Exit codes: those of torchtitan_rl.train; 128 + N when a rank or the run was ended by signal N; 75 when SIGUSR1 or SIGUSR2 (a
batch system's time limit) asked for an end: saved, and the same command goes on; 1 when the watchdog ended a hung job.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchtitan_rl.core.errors import UserError, expect
from torchtitan_rl.resilience import death, processes
from torchtitan_rl.resilience.board import WATCH, Place, named, places
from torchtitan_rl.resilience.checkpoints import CheckpointFolder
from torchtitan_rl.resilience.rank_output import failure_marker
from torchtitan_rl.resilience.watchdog import Watchdog

REQUEUE = 75
LOOK_EVERY_S = 0.2
WATCH_EVERY_S = 1.0
WAIT_TOLD_S = 10.0
GRACE_S = 8.0
"""Seconds that the other ranks of a node have to end by themselves after one has died."""


class Launcher:
    """One node's part of a job: torchrun's agent, the ranks that it starts, and what is known of them."""

    def __init__(self, args: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torchtitan_rl-"))
        self.mark = f"{WATCH}={self.folder}"
        self.watchdog = Watchdog(self.folder, say)
        self.oom_detector = death.OomDetector()
        self.asked = 0
        """The signal that asked for an end, 0 before."""
        self.asked_at = 0.0
        self.hung = ""
        """Why the watchdog ended the job."""
        self._waits_for_nodes = any(arg.startswith("--nnodes") for arg in args)
        self._args = args
        self._tells_wait_at = WAIT_TOLD_S
        self._known: dict[int, Place] = {}
        self._peak_bytes: dict[int, int] = {}  # the most memory of each process while it lived
        self._died_at: dict[int, float] = {}
        self._former: set[int] = set()
        processes.start_guard(self.mark)
        environment = {**os.environ, WATCH: str(self.folder)}
        environment.setdefault("TORCHTITAN_RL_STARTED", time.strftime("%Y%m%d-%H%M%S"))
        # Its own name, which torchrun would take, may be one that nobody knows.
        alone = ["--local_addr=localhost"] if "--standalone" in args else []
        command = [sys.executable, "-m", "torchtitan_rl.resilience.agent", *alone, *args]
        # In a session of its own: a terminal's Ctrl-C comes to the ranks once, from here.
        self.agent = subprocess.Popen(command, env=environment, start_new_session=True)
        for number in processes.stops():
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Watch until the agent has ended; returns the exit code, having said what there is to say."""
        began, watched = time.monotonic(), 0.0
        while self.agent.poll() is None:
            self._note_deaths()
            now = time.monotonic()
            if now - watched > WATCH_EVERY_S:
                watched = now
                self._tell_wait(now - began)
                if (reason := self.watchdog.look(now)) and not self.hung:
                    self._end_hung(reason)
            time.sleep(LOOK_EVERY_S)
        self._note_deaths()
        code, why = self._verdict(self.agent.returncode)
        if why:
            say(why)
        if code not in (0, REQUEUE) and not self.asked:
            self.watchdog.tell_end(why or self.hung or f"it ended with code {code}")
        return code

    def close(self) -> None:
        """End what is left of the job's processes; forget where they were."""
        processes.kill_marked(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self.asked_at < processes.SAME_REQUEST_S:
            return
        if self.asked:
            say("stopped at once; what was saved before is whole")
            self.agent.kill()
            self.close()
            os._exit(128 + self.asked)
        self.asked, self.asked_at = number, now
        if not self._known and not processes.children(self.agent.pid):
            self.agent.kill()  # it waits for other nodes, in a call that hears no signal
        for pid in [place.pid for place in places(self.folder)] or processes.marked(self.mark):
            processes.send(pid, number)

    def _note_deaths(self) -> None:
        """Remember who died when; tell the living by the marker file that there is no step to finish, and end them if they do not.

        A rank that waits for a dead one in NCCL does not see it, and torchrun sees nothing wrong in one that ended with code 0.
        """
        now = time.monotonic()
        here = [place for place in places(self.folder) if place.pid not in self._former]
        self._tell_restart(here)
        for place in here:
            self._known[place.pid] = place
            self._peak_bytes[place.pid] = processes.peak_bytes(place.pid) or self._peak_bytes.get(place.pid, 0)
            if place.pid not in self._died_at and processes.state(place.pid) in ("", "Z"):
                self._died_at[place.pid] = now
                if not place.outcome:
                    _mark_failed(place.run_folder)
        early = [at for pid, at in self._died_at.items() if not self._known[pid].outcome]
        if early and now - min(early) > GRACE_S:
            for place in here:
                processes.send(place.pid, signal.SIGKILL)

    def _tell_wait(self, waited: float) -> None:
        """Say, more and more seldom, that torchrun starts no rank before the other nodes have come."""
        if self._waits_for_nodes and waited > self._tells_wait_at and not processes.children(self.agent.pid):
            self._tells_wait_at = 2 * waited
            waits = (
                f"no rank is started yet after {waited:.0f} s: torchrun waits for the same command on the other nodes"
            )
            say(waits + unknown_address(self._args))

    def _failures(self) -> list[tuple[int, int]]:
        """(process id, exit code, negative for a signal) of failed ranks as the agent reports them."""
        file = self.folder / "failures.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(entry["pid"], entry["exitcode"]) for entry in map(json.loads, lines)]

    def _tell_restart(self, here: list[Place]) -> None:
        """With --max-restarts the agent starts the ranks again: say after what, and forget those of before."""
        before = {place.rank: pid for pid, place in self._known.items()}
        if any(before.get(place.rank, place.pid) != place.pid for place in here):
            say(
                f"{self._describe(*self._first_death())} The ranks are started again and go on from the last checkpoint."
            )
            self._former |= self._known.keys()
            self._known.clear()
            self._died_at.clear()
            self.hung = ""

    def _end_hung(self, reason: str) -> None:
        self.hung = reason
        say(f"watchdog: {reason}; the job is ended")
        for place in places(self.folder):
            processes.send(place.pid, signal.SIGKILL)

    def _verdict(self, agent_code: int) -> tuple[int, str]:
        """The exit code, and what no rank has said."""
        outcomes = {place.outcome for place in self._known.values()}
        if self.hung:
            return 1, ""
        if agent_code == 0 and "" not in outcomes:
            return _code_of_stop(max((int(outcome) for outcome in outcomes - {"done"}), default=0)), ""
        if self.asked and outcomes <= {""}:
            name = signal.Signals(self.asked).name
            return 128 + self.asked, f"{name} before there was a step to finish: nothing new is saved"
        if agent_code < 0:
            why = self.oom_detector.explain(self.agent.pid, -agent_code)
            return 128 - agent_code, f"torchrun's agent was {why} The ranks ended with it."
        pid, code = self._first_death()
        if pid not in self._known:  # no program of ours, or nothing started
            return agent_code, ""
        if code > 0:
            return code, ""
        return 128 - code if code else 1, f"{self._describe(pid, code)} {_way_on(self._known[pid].run_folder)}"

    def _first_death(self) -> tuple[int, int]:
        """(process id, exit code, negative for a signal) of the rank that died first, of those that did not end by plan.

        Of the ranks that died within a second of it, one that was killed comes before those that then lost it.
        """
        codes = dict(self._failures())
        died = {pid: at for pid, at in self._died_at.items() if not self._known[pid].outcome}
        early = [pid for pid, at in died.items() if at <= min(died.values()) + 1.0] or list(codes) or [0]
        return min(((pid, codes.get(pid, 0)) for pid in early), key=lambda death: _tells_least(death[1]))

    def _describe(self, pid: int, code: int) -> str:
        place = self._known.get(pid)
        who = f"{named([place])} in {place.phase}" if place else f"process {pid}"
        if code >= 0:
            return f"{who} ended with code {code} before the end of training."
        known = {"phase": place.phase if place else "", "peak_bytes": self._peak_bytes.get(pid, 0)}
        return f"{who} was {self.oom_detector.explain(pid, -code, **known)}"


def _tells_least(code: int) -> int:
    """Order of exit codes by how likely they are the cause: killed, vanished, stopped with a message, failed, ended by torchrun."""
    if code == -signal.SIGTERM:
        return 4
    return 0 if code < 0 else {0: 1, 1: 3}.get(code, 2)


def _mark_failed(run_folder: str) -> None:
    if run_folder and Path(run_folder).is_dir():
        marker = failure_marker(Path(run_folder))
        marker.parent.mkdir(exist_ok=True)
        marker.touch()


def _way_on(run_folder: str) -> str:
    """What is left of the run, and the command that uses it."""
    if not run_folder:
        return "It had no run folder yet: the same command begins anew."
    newest = CheckpointFolder(Path(run_folder)).newest()
    goes_on = f"goes on after {newest.name}" if newest else "begins anew, as no checkpoint was saved"
    return f"The same command with --dump-folder {run_folder} {goes_on}."


def _code_of_stop(number: int) -> int:
    """0 for no signal."""
    if number == 0:
        return 0
    return REQUEUE if number in (signal.SIGUSR1, signal.SIGUSR2) else 128 + number


def check_threads(given: str) -> None:
    """Raise UserError for a number of threads that OpenMP does not take: it says so in a line of its own and uses all cores."""
    counts = all(part.strip().isdecimal() and int(part) > 0 for part in given.split(","))
    expect(counts, "OMP_NUM_THREADS", given, "a number of threads for each rank, 1 or more", "Leave it out.")


def unknown_address(args: list[str]) -> str:
    """That this node cannot find node 0 by its name, for now; "" where it can."""
    for name, _, address in (arg.partition("=") for arg in args):
        if name in ("--master_addr", "--master-addr"):
            try:
                socket.getaddrinfo(address, None)
            except OSError as error:
                return f", and does not know the address {address!r} of node 0: {error.strerror}"
    return ""


def say(text: str) -> None:
    """A line on the terminal, from no rank. Where nobody reads it the job goes on all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_streams() -> None:
    """Where the one who started this has closed a standard stream, as some daemons do, the next file would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def find_installed_programs() -> None:
    """Put the environment's own programs on PATH, behind the user's: FlashInfer compiles only where it finds ninja there."""
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), sysconfig.get_path("scripts")]))


def main() -> None:
    """Launch what torchrun's command line says, and exit with what came of it."""
    open_streams()
    find_installed_programs()
    # A thread that has done its share of an operation sleeps. By default it spins, and where another process wants the cores
    # that keeps the very thread it waits for from running: small operations then take six times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        check_threads(os.environ.get("OMP_NUM_THREADS", "1"))
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
    launcher = Launcher(sys.argv[1:])
    try:
        code = launcher.run()
    finally:
        launcher.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
