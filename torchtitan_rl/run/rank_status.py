"""Each rank's status: its phase and since when, in a small file that the launcher and rank 0's heartbeat read.

The files are in a folder of this node, which the launcher names by an environment variable. Writing them needs no collective and
no thread. The status of a rank that hangs, is stopped or is dead can still be read.
"""

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_rl.events import WATCH_VARIABLE, Kind, Listener
from torchtitan_rl.fields.number import number
from torchtitan_rl.run.job_processes import is_alive, state

SHOW_STACKS = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of its threads, even if it hangs: the handler is C code and does not need Python's lock."""
STARTING_NOTICE_S, STARTING_LIMIT_S, ENDING_LIMIT_S = 600.0, 7200.0, 600.0
"""Least notice and limit before the first step; seconds that a rank may take after its training."""
SLOWER = 3.0
"""A rank is late after so many times its longest time without progress in any step, but never before the notice."""
CHANGES_PER_STEP = 10_000
ADVANCED_EVERY_S = 1.0
"""Seconds between two writes of progress within a phase."""
FORKED = b"a reward or tool forked and returned in the child too: the child ends here\n"


@dataclass(kw_only=True, slots=True)
class WatchdogLimits:
    notice_seconds: float = number(25.0, least=1)
    """The watchdog names a rank and prints its stack when it shows no progress for longer than this and longer than three times
    what it has needed so far in a step. Progress is the begin of a phase and each decoded token or micro-batch."""

    limit_seconds: float = number(1500.0, least=1)
    """The watchdog ends the job when a rank shows no progress for longer than this. Set it above the slowest reward and below
    comm.init_timeout_seconds, whose error names no rank."""


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank. Times are seconds of the node's monotonic clock.

    Example: RankStatus(rank=1, host="node0", pid=712, phase="step 3: grade", began=3600.2, progressed=3604.0, ...)
    """

    rank: int
    host: str
    pid: int
    phase: str = "start"
    began: float = 0.0
    """When the phase began."""
    progressed: float = 0.0
    """When it last showed progress, such as a decoded token."""
    changes: int = 0
    """Phase changes so far; a step counts as 10,000. All ranks run one program: the one with the fewest holds up the others."""
    notice_s: float = STARTING_NOTICE_S
    limit_s: float = STARTING_LIMIT_S
    """Seconds without progress after which the rank is late in this phase, and after which the job ends."""
    waits: bool = False
    """Whether it waits for ranks that work on something else: generators of their own, or their trainers."""
    side: str = ""
    """Its name for such a wait, by which trainers and generators differ; "" if all ranks do the same."""
    run_folder: str = ""
    """Where the launcher writes how a rank ended that cannot do so."""
    keeps_record: bool = False
    """Whether the folder says how an earlier start ended, and goes on doing so: this one only evaluates."""
    outcome: str = ""
    """How training ended on this rank: "done", or the number of the signal that stopped it after a checkpoint."""


class StatusFile(Listener):
    """This rank's status, written at every change. Writes nothing if no launcher watches."""

    def __init__(self, rank: int) -> None:
        self._file: int | None = None
        self.limits = WatchdogLimits()
        self._longest_s = 0.0
        """Longest time without progress in a step so far."""
        now = time.monotonic()
        self.status = RankStatus(rank, socket.gethostname(), os.getpid(), began=now, progressed=now)
        if folder := watch_folder():
            self._file = os.open(folder / f"rank_{rank}.json", os.O_WRONLY | os.O_CREAT, 0o600)
            stacks = stacks_path(folder, rank).open("a")
            faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
            self.update()

    def set_outcome(self, outcome: str) -> None:
        """Training has ended; only the report and the close of the engine are left."""
        now = time.monotonic()
        self.update(outcome=outcome, phase="end", began=now, progressed=now, limit_s=ENDING_LIMIT_S)

    def moved(self, where: str) -> None:
        if os.getpid() != self.status.pid:
            os.write(2, FORKED)
            os._exit(1)
        self._note_progress()
        changes, step = self.status.changes + 1, _step(where)
        if step > self.status.changes // CHANGES_PER_STEP:  # the ranks are level again
            changes = step * CHANGES_PER_STEP
        notice_s, limit_s = self.limits.notice_seconds, self.limits.limit_seconds
        if step:
            notice_s = max(notice_s, min(SLOWER * self._longest_s, limit_s / 2))
        else:
            notice_s, limit_s = max(notice_s, STARTING_NOTICE_S), max(limit_s, STARTING_LIMIT_S)
        now = time.monotonic()
        self.update(phase=where, began=now, progressed=now, changes=changes, notice_s=notice_s, limit_s=limit_s)  # fmt: skip

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        if kind != "waiting":
            yield
            return
        self.update(waits=True, side=name)
        try:
            yield
        finally:
            self.update(waits=False, progressed=time.monotonic())

    def advanced(self) -> None:
        if time.monotonic() - self.status.progressed > ADVANCED_EVERY_S:
            self._note_progress()
            self.update(progressed=time.monotonic())

    def _note_progress(self) -> None:
        if _step(self.status.phase):
            self._longest_s = max(self._longest_s, time.monotonic() - self.status.progressed)

    def update(self, **entries: str | float) -> None:
        self.status = replace(self.status, **entries)
        if self._file is not None:
            text = json.dumps(asdict(self.status)).encode()
            os.pwrite(self._file, text.ljust(4096), 0)  # one write of a page: readers see all of it


def _step(phase: str) -> int:
    """The step number in a phase such as "step 12: grade"; 0 outside of steps."""
    first, _, rest = phase.partition(" ")
    return int(rest.partition(":")[0]) if first == "step" else 0


def watch_folder() -> Path | None:
    """The folder of this node's statuses; None if no launcher watches."""
    folder = os.environ.get(WATCH_VARIABLE)
    return Path(folder) if folder and Path(folder).is_dir() else None


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"stacks_rank_{rank}.txt"


def failure_marker() -> Path | None:
    """The file that the first failing rank of this node leaves; None if no launcher watches."""
    folder = watch_folder()
    return folder / "failed" if folder else None


def mark_failed() -> bool:
    """Leave the marker of a rank that fails and says why. Returns whether no other rank of this node has left it before."""
    try:
        if marker := failure_marker():
            marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk may be the reason to fail
        pass
    return True


def read_statuses(folder: Path | None) -> list[RankStatus]:
    """The statuses of this node's ranks, by rank."""
    statuses = []
    for path in folder.glob("rank_*.json") if folder else ():
        with suppress(OSError, ValueError):  # not readable at the moment
            statuses.append(RankStatus(**json.loads(path.read_text())))
    return sorted(statuses, key=lambda status: status.rank)


def has_vanished(status: RankStatus) -> bool:
    """Whether a rank has ended before the end of training."""
    return not status.outcome and not is_alive(status.pid)


def rank_failed() -> bool:
    """Whether a rank of this node has failed or vanished, so that torchrun ends the others."""
    marker = failure_marker()
    if marker is None:
        return False
    return marker.exists() or any(map(has_vanished, read_statuses(marker.parent)))


def is_stopped(status: RankStatus) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a rank."""
    return state(status.pid) in ("T", "t")


def stragglers(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that hold up the others: those that are stopped; without any, of those that do not wait for others' work, those with
    the fewest phase changes. Empty if all wait, for another node's ranks."""
    if stopped := [status for status in ranks if is_stopped(status)]:
        return stopped
    ranks = [status for status in ranks if not status.waits]
    fewest = min((status.changes for status in ranks), default=0)
    return [status for status in ranks if status.changes == fewest]


def describe(ranks: Sequence[RankStatus], now: float) -> str:
    """Which ranks hold up the others, in which phase and for how long, and which ranks wait. Those that do neither are left out.

    Example: "rank 1 (node3) in step 3: grade for 26 s; ranks 0, 2, 3 wait in step 3: gather"
    """
    slow = stragglers(ranks)
    phase_s = now - max(status.began for status in slow)
    quiet_s = now - max(status.progressed for status in slow)
    text = f"{named(slow)} in {slow[0].phase} for {phase_s:.0f} s"
    if phase_s > quiet_s:
        text += f", without progress for {quiet_s:.0f} s"
    others = [status for status in ranks if status not in slow]
    if ahead := [status for status in others if status.waits or status.side == slow[0].side]:
        text += f"; {named(ahead)} {'wait' if len(ahead) > 1 else 'waits'} in {ahead[0].phase}"
    return text


def named(ranks: Sequence[RankStatus]) -> str:
    """Example: "rank 1 (node3)", "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} ({ranks[0].host})"
    return f"ranks {', '.join(str(status.rank) for status in ranks)}"


def slowest() -> str:
    """The ranks of this node that hold up the others; "" if there are none, or if no launcher watches."""
    ranks = read_statuses(watch_folder())
    return describe(ranks, time.monotonic()) if 0 < len(stragglers(ranks)) < len(ranks) else ""
