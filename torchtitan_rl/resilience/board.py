"""Where each rank is: a few bytes that it writes at every change of phase, and that the launcher and rank 0's heartbeat read.

Files in a folder of the node's own, named by an environment variable: no collective, no thread, and no wait in a step; a rank
that hangs, is stopped or is dead can be read as well as one that runs.
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

from torchtitan_rl.core.config import number
from torchtitan_rl.core.events import Listener
from torchtitan_rl.resilience import processes

WATCH = "TORCHTITAN_RL_WATCH"
"""The environment variable with the folder. Every process of a job on this node has it, so it marks them too."""

SHOW_STACKS = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of its threads, whatever it is doing: the handler is C and needs no lock of Python's."""


CHANGES_A_STEP = 10_000
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Example: Place(rank=1, host="node0", pid=712, phase="step 3: grade", since=3600.2, changes=41, ...)
    """

    rank: int
    host: str
    pid: int
    phase: str = "start"
    since: float = 0.0
    """When it entered the phase, in seconds of the node's monotonic clock."""
    changes: int = 0
    """Of phase, so far, the steps counted as 10,000. All ranks run one program: who has the fewest holds up the others."""
    run_folder: str = ""
    all_here: bool = True
    """Whether all ranks of the job are on this node."""
    notice_s: float = 25.0
    limit_s: float = 1500.0
    outcome: str = ""
    """How training ended on this rank: "done", or the number of the signal that stopped it after a save."""


@dataclass(kw_only=True, slots=True)
class WatchdogLimits:
    notice_seconds: float = number(25.0, least=1)
    """A rank that is longer in one phase than this, and than three times the longest so far, is named with its stacks."""

    limit_seconds: float = number(1500.0, least=1)
    """A job in which a rank is longer in one phase than this is ended: more than the slowest generation, and less than
    comm.init_timeout_seconds, whose end names nobody."""


FORKED = b"a reward or tool forked and returned in the child too: the child ends here\n"


class Board(Listener):
    """A rank's own place, written whenever it changes. Does nothing where no launcher watches."""

    def __init__(self, rank: int, folder: str | None = None) -> None:
        self._file: int | None = None
        all_here = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        self.place = Place(rank=rank, host=_HOST, pid=os.getpid(), since=time.monotonic(), all_here=all_here)
        folder = os.environ.get(WATCH) if folder is None else folder
        if folder and Path(folder).is_dir():
            self._file = os.open(place_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            stacks = os.open(stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
            self.update()

    def moved(self, where: str) -> None:
        """See Listener."""
        if os.getpid() != self.place.pid:
            os.write(2, FORKED)
            os._exit(1)
        changes = self.place.changes + 1
        if (step := _step(where)) != _step(self.place.phase):  # counted anew: only a step is the same on every rank
            changes = step * CHANGES_A_STEP
        self.update(phase=where, since=time.monotonic(), changes=changes)

    def update(self, **entries: str | float) -> None:
        """Change entries of this rank's place."""
        self.place = replace(self.place, **entries)
        if self._file is not None:
            text = json.dumps(asdict(self.place)).encode()
            os.pwrite(self._file, text.ljust(4096), 0)  # one write of one page: readers see it whole, or try again


def _step(phase: str) -> int:
    """The number in "step 12: grade"; 0 outside of steps."""
    first, _, rest = phase.partition(" ")
    return int(rest.partition(":")[0]) if first == "step" else 0


def place_file(folder: str | Path, rank: int) -> Path:
    """Where a rank writes its place."""
    return Path(folder) / f"rank_{rank}.json"


def stacks_file(folder: str | Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return Path(folder) / f"stacks_{rank}.txt"


def places(folder: str | Path) -> list[Place]:
    """The places of this node's ranks, by rank; one that cannot be read now is left out."""
    found = []
    for path in Path(folder).glob("rank_*.json"):
        try:
            found.append(Place(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda place: place.rank)


def behind(ranks: Sequence[Place]) -> list[Place]:
    """Those that hold up the others: the ones with the fewest changes of phase; all of them, when none is ahead.

    Of those, when a signal has stopped some: in a phase with a collective the others wait for them in the same phase.
    """
    fewest = min((place.changes for place in ranks), default=0)
    slow = [place for place in ranks if place.changes == fewest]
    return [place for place in slow if place.host == _HOST and processes.is_stopped(place.pid)] or slow


def describe(ranks: Sequence[Place], now: float) -> str:
    """Who is behind, where, for how long, and who waits.

    Example: "rank 1 in step 3: grade for 26 s; ranks 0, 2, 3 wait in step 3: gather"
    """
    slow = behind(ranks)
    text = f"{named(slow)} in {slow[0].phase} for {now - max(p.since for p in slow):.0f} s"
    if ahead := [place for place in ranks if place not in slow]:
        text += f"; {named(ahead)} {'wait' if len(ahead) > 1 else 'waits'} in {ahead[0].phase}"
    return text


def named(ranks: Sequence[Place]) -> str:
    """Example: "rank 1 (node3)", "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} ({ranks[0].host})"
    shown = ", ".join(str(place.rank) for place in ranks[:8])
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def heartbeat_text() -> str:
    """Who holds up the others on this node, for the heartbeat; "" where that is nobody, or nobody watches."""
    ranks = places(os.environ[WATCH]) if WATCH in os.environ else []
    return describe(ranks, time.monotonic()) if len(behind(ranks)) < len(ranks) else ""
