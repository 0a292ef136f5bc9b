"""Each rank's status: its phase and since when, in a small file that the launcher and rank 0's heartbeat read.

The files are in a folder of this node, named by an environment variable. Writing them needs no collective and no thread, and a
step never waits for them. The status of a rank that hangs, is stopped or is dead can still be read.
"""

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_rl.events import Listener
from torchtitan_rl.fields.number import number
from torchtitan_rl.run import job_processes
from torchtitan_rl.run.job_processes import WATCH_VARIABLE

SHOW_STACKS = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of its threads, even if it hangs: the handler is C code and does not need Python's lock."""

CHANGES_PER_STEP = 10_000
ADVANCED_EVERY_S = 1.0
"""Seconds between two writes of progress within a phase."""
_HOST = socket.gethostname()

FORKED = b"a reward or tool forked and returned in the child too: the child ends here\n"


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank.

    Example: RankStatus(rank=1, host="node0", pid=712, phase="step 3: grade", since=3600.2, changes=41, ...)
    """

    rank: int
    host: str
    pid: int
    phase: str = "start"
    since: float = 0.0
    """Time at which the rank entered the phase, in seconds of the node's monotonic clock."""
    advanced: float = 0.0
    """Time of the last progress reported within the phase, such as a decoded token, by the same clock; 0 without any."""
    changes: int = 0
    """Phase changes so far; a step counts as 10,000. All ranks run one program: the one with the fewest holds up the others."""
    run_folder: str = ""
    all_here: bool = True
    """Whether all ranks of the job are on this node."""
    notice_s: float = 25.0
    limit_s: float = 1500.0
    outcome: str = ""
    """How training ended on this rank: "done", or the number of the signal that stopped it after a checkpoint."""

    @property
    def quiet_since(self) -> float:
        """Time of the last sign of progress: the rank entered its phase, or advanced in it."""
        return max(self.since, self.advanced)


@dataclass(kw_only=True, slots=True)
class WatchdogLimits:
    notice_seconds: float = number(25.0, least=1)
    """The watchdog names a rank and prints its stack when a phase shows no progress for longer than this and longer than three
    times what this run has needed so far: in this phase or, if it has never ended yet, in any. Progress is the phase's begin and
    each decoded token or micro-batch."""

    limit_seconds: float = number(1500.0, least=1)
    """The watchdog ends the job when one phase of a rank shows no progress for longer than this. Set it above the slowest reward
    and below comm.init_timeout_seconds, whose error names no rank."""


class StatusFile(Listener):
    """This rank's status, written at every change. Writes nothing if no launcher watches."""

    def __init__(self, rank: int, folder: str | None = None) -> None:
        self._file: int | None = None
        all_here = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        self.status = RankStatus(
            rank=rank, host=_HOST, pid=os.getpid(), since=time.monotonic(), all_here=all_here
        )
        folder = os.environ.get(WATCH_VARIABLE) if folder is None else folder
        if folder and Path(folder).is_dir():
            self._file = os.open(
                status_file_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
            )
            stacks = os.open(
                stacks_file_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )
            faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
            self.update()

    def moved(self, where: str) -> None:
        if os.getpid() != self.status.pid:
            os.write(2, FORKED)
            os._exit(1)
        changes, step = self.status.changes + 1, _step(where)
        if step != _step(
            self.status.phase
        ):  # within a step, ranks may change phase more or less often
            changes = step * CHANGES_PER_STEP
        self.update(phase=where, since=time.monotonic(), changes=changes)

    def advanced(self) -> None:
        now = time.monotonic()
        if now - self.status.quiet_since > ADVANCED_EVERY_S:
            self.update(advanced=now)

    def update(self, **entries: str | float) -> None:
        """Change fields of this rank's status and write it."""
        self.status = replace(self.status, **entries)
        if self._file is not None:
            text = json.dumps(asdict(self.status)).encode()
            os.pwrite(
                self._file, text.ljust(4096), 0
            )  # one write of one page: a reader sees all of it, or retries


def _step(phase: str) -> int:
    """The step number in a phase such as "step 12: grade"; 0 outside of steps."""
    first, _, rest = phase.partition(" ")
    return int(rest.partition(":")[0]) if first == "step" else 0


def status_file_path(folder: str | Path, rank: int) -> Path:
    """The file with a rank's status."""
    return Path(folder) / f"rank_{rank}.json"


def stacks_file_path(folder: str | Path, rank: int) -> Path:
    """The file with a rank's stacks."""
    return Path(folder) / f"stacks_{rank}.txt"


def read_statuses(folder: str | Path) -> list[RankStatus]:
    """The statuses of this node's ranks, by rank, without those that cannot be read at the moment."""
    found = []
    for path in Path(folder).glob("rank_*.json"):
        try:
            found.append(RankStatus(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda status: status.rank)


def stragglers(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that hold up the others: those with the fewest phase changes; all ranks if they are equal.

    If a signal has stopped some of these, only the stopped ones: in a collective the others wait for them in the same phase.
    """
    fewest = min((status.changes for status in ranks), default=0)
    slow = [status for status in ranks if status.changes == fewest]
    return [status for status in slow if is_stopped_here(status)] or slow


def is_stopped_here(status: RankStatus) -> bool:
    """Whether it is a rank of this node, and a signal has stopped it."""
    return status.host == _HOST and job_processes.is_stopped(status.pid)


def describe_stragglers(ranks: Sequence[RankStatus], now: float) -> str:
    """Which ranks hold up the others, in which phase and for how long, and which ranks wait.

    Example: "rank 1 (node3) in step 3: grade for 26 s; ranks 0, 2, 3 wait in step 3: gather"
    """
    slow = stragglers(ranks)
    text = f"{name_ranks(slow)} in {slow[0].phase} for {now - max(status.since for status in slow):.0f} s"
    if any(status.advanced > status.since for status in slow):
        text += f", without progress for {now - max(status.quiet_since for status in slow):.0f} s"
    if ahead := [status for status in ranks if status not in slow]:
        text += f"; {name_ranks(ahead)} {'wait' if len(ahead) > 1 else 'waits'} in {ahead[0].phase}"
    return text


def name_ranks(ranks: Sequence[RankStatus]) -> str:
    """Example: "rank 1 (node3)", "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} ({ranks[0].host})"
    shown = ", ".join(str(status.rank) for status in ranks[:8])
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def heartbeat_text() -> str:
    """The ranks of this node that hold up the others; "" if there are none, or if no launcher watches."""
    ranks = read_statuses(os.environ[WATCH_VARIABLE]) if WATCH_VARIABLE in os.environ else []
    return (
        describe_stragglers(ranks, time.monotonic()) if len(stragglers(ranks)) < len(ranks) else ""
    )
