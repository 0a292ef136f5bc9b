"""Says who holds up whom, with their stacks, before anybody wonders; ends a job in which nothing moves any more.

Runs in the launcher, a process without torch that no rank can block, and reads the boards (run/board.py). Nodes tell each other
through files in the run folder. Durations are of the monotonic clock, which is one for all processes of a node and stands still
while the machine sleeps: a clock that is set, or a laptop that wakes up, ends no job.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_rl.resilience import processes
from torchtitan_rl.resilience.board import SHOW_STACKS, Place, behind, describe, named, places, stacks_file

STARTING_NOTICE_S, STARTING_LIMIT_S = 600.0, 7200.0
"""At least these for phases of the start (a warm start, a download), which are long by nature and say themselves that they go on."""

SLOWER = 3.0
"""A phase is late at this many times the longest that it has taken so far, and not before the notice."""

SHARE_EVERY_S = 5.0
SILENT_NODE_S, SILENT_NODE_ENDS_S = 30.0, 180.0
"""Of a node whose launcher writes nothing any more: when it is said, and when this node's part of the job ends."""

STACK_LINES = 14
"""Of the main thread, innermost first: on the terminal. All threads whole are in the run folder's logs/."""


@dataclass(frozen=True)
class _News:
    """What another node's launcher wrote last."""

    at: float
    """By that node's calendar clock: tells one writing from the next."""
    heard: float
    """By this node's monotonic clock, as its places are."""
    places: list[Place]
    ended: str
    current: bool
    """Whether it is of this job, and not what an earlier one has left."""


class Watchdog:
    """Looks at all ranks' places, every second or so."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self._longest: dict[str, float] = {}
        self._seen: dict[int, Place] = {}
        self._said: dict[tuple[int, int], float] = {}
        self._silent: set[str] = set()
        self._lost = ""
        self._news: dict[str, _News] = {}
        self._began = time.time()
        self._shared_at = 0.0
        self._shared: Path | None = None
        self._told: list[Place] = []

    def look(self, now: float) -> str:
        """Say what is late. Returns why the job must end, or "" while it may go on."""
        # Of the dead the launcher tells, and those that were started again are in place of them soon.
        local = [place for place in places(self.folder) if processes.state(place.pid) not in ("", "Z")]
        ranks = local + self._of_other_nodes(local, now)
        for place in ranks:
            self._learn(place)
        going = [place for place in ranks if not place.outcome]
        if not local or not going or self._lost:
            return self._lost
        slow = behind(going)
        waited = now - max(place.since for place in slow)
        if waited > _limit(slow[0]):
            return f"{describe(going, now)}: longer than watchdog.limit_seconds ({_limit(slow[0]):.0f} s)"
        key = (slow[0].rank, slow[0].changes)
        if waited > max(self._deadline(slow[0]), 2 * self._said.get(key, 0.0)):
            self._said[key] = waited
            self._tell(slow, going, now)
        return ""

    def _deadline(self, first: Place) -> float:
        """Seconds after which a rank is late in its phase."""
        notice = first.notice_s if _in_a_step(first) else max(first.notice_s, STARTING_NOTICE_S)
        return max(notice, SLOWER * self._longest.get(_kind(first.phase), 0.0))

    def _learn(self, place: Place) -> None:
        before = self._seen.get(place.rank)
        if before is not None and before.changes != place.changes and before.pid == place.pid:
            kind = _kind(before.phase)
            self._longest[kind] = max(self._longest.get(kind, 0.0), place.since - before.since)
        self._seen[place.rank] = place

    def _tell(self, slow: list[Place], going: list[Place], now: float) -> None:
        self.say(f"watchdog: {describe(going, now)}; the job is ended at {_limit(slow[0]):.0f} s")
        for place in [place for place in slow if (self.folder / f"rank_{place.rank}.json").exists()][:4]:
            self.say(_what_it_does(place, self.folder))

    def _of_other_nodes(self, local: list[Place], now: float) -> list[Place]:
        """What the other nodes' launchers wrote of theirs; theirs are told of ours. [] on one node."""
        if not local or local[0].all_here or not local[0].run_folder:
            return []
        shared = Path(local[0].run_folder) / "logs" / "nodes"
        mine = shared / f"{local[0].host}-{os.getpid()}.json"
        if now - self._shared_at > SHARE_EVERY_S:
            self._shared_at, self._shared, self._told = now, mine, local
            self._share(now)
        for path in set(shared.glob("*.json")) - {mine}:
            self._hear(path, now)
        current = {node: news for node, news in self._news.items() if news.current}
        found: dict[int, Place] = {}
        for news in sorted(current.values(), key=lambda news: news.heard):  # of a rank that moved, the later
            found |= {place.rank: place for place in news.places}
        for node, news in current.items():
            self._note_silence(node, [p for p in news.places if found[p.rank] is p], now - news.heard)
            if news.ended:
                self._lost = f"node {node} has ended: {news.ended}"
        return [place for rank, place in found.items() if rank not in {p.rank for p in local}]

    def _hear(self, path: Path, now: float) -> None:
        """Take in what another node wrote, if it is new."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # unreadable now
            content = json.loads(path.read_text())
            before = self._news.get(path.stem)
            if before is not None and before.at == content["at"]:
                return
            told = [Place(**place) for place in content["places"]]
            ours = [replace(place, since=now - (content["sent"] - place.since)) for place in told]
            current = before is not None or content["at"] > self._began
            self._news[path.stem] = _News(content["at"], now, ours, content["ended"], current)

    def tell_end(self, why: str) -> None:
        """Let the other nodes know that this one has ended, so that they do not wait for it."""
        if self._shared is not None:
            self._share(time.monotonic(), why)

    def _share(self, now: float, ended: str = "") -> None:
        places = [asdict(place) for place in self._told]
        content = {"at": time.time(), "sent": now, "places": places, "ended": ended}
        with suppress(OSError):
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            new = self._shared.with_suffix(".new")
            new.write_text(json.dumps(content))
            new.replace(self._shared)

    def _note_silence(self, node: str, theirs: list[Place], seconds: float) -> None:
        going = [place for place in theirs if not place.outcome]
        if not going or seconds < SILENT_NODE_S:
            return
        text = f"nothing is heard of {named(going)} on node {node} for {seconds:.0f} s"
        if node not in self._silent:
            self._silent.add(node)
            self.say(f"watchdog: {text}; the job is ended at {SILENT_NODE_ENDS_S:.0f} s")
        if seconds > SILENT_NODE_ENDS_S:
            self._lost = text


def _in_a_step(place: Place) -> bool:
    return place.phase.startswith("step ")


def _limit(place: Place) -> float:
    """Seconds that a rank may stay in its phase until the job is ended."""
    return place.limit_s if _in_a_step(place) else max(place.limit_s, STARTING_LIMIT_S)


def _kind(phase: str) -> str:
    """A phase without its step's number: "step 12: grade" is a "step: grade"."""
    return re.sub(r"^step \d+", "step", phase)


def _what_it_does(place: Place, folder: Path) -> str:
    """The process's state, and its stacks where it can still show them."""
    letter = processes.state(place.pid)
    if processes.is_stopped(place.pid):
        return f"rank {place.rank} is stopped by a signal: kill -CONT {place.pid} on {place.host} lets it go on"
    if letter in ("", "Z"):
        return f"rank {place.rank} (pid {place.pid} on {place.host}) is dead"
    waits = ", in the kernel, as on a disk or a device that does not answer" if letter == "D" else ""
    stacks = _stacks(place, folder)
    return f"rank {place.rank} (pid {place.pid} on {place.host}{waits}) is at:\n{stacks}"


def _stacks(place: Place, folder: Path) -> str:
    """Makes the rank write its stacks; the main thread's innermost frames, and where the rest is."""
    file = stacks_file(folder, place.rank)
    if not file.exists():
        return "  (it does not show its stacks)"
    begin = file.stat().st_size
    processes.send(place.pid, SHOW_STACKS)
    time.sleep(0.5)
    written = file.read_text()[begin:]
    if not written:
        return "  (it does not answer)"
    threads = written.strip().split("\n\n")
    main = next((t for t in threads if t.startswith("Current thread")), threads[-1]).splitlines()
    kept = ""
    if place.run_folder:
        with suppress(OSError):
            shutil.copy(file, target := Path(place.run_folder) / "logs" / f"stacks_rank_{place.rank}.txt")
            kept = f"\n  (all threads: {target})"
    more = f"\n  ... {len(main) - STACK_LINES} more" if len(main) > STACK_LINES else ""
    return "\n".join(main[1 : STACK_LINES + 1]) + more + kept
