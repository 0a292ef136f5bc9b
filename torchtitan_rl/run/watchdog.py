"""Reports ranks that hold up the others, with their stacks, and ends a job that makes no progress.

The watchdog runs in the launcher, a process without torch that no rank can block, and reads the ranks' statuses
(rank_status.py). Nodes exchange theirs through files in the run folder. Durations are of the monotonic clock, which all
processes of a node share and which stops while the machine sleeps: changing the clock or suspending a laptop ends no job. Nor does
a pause of the job (SIGSTOP, `docker pause`, `scontrol suspend`): the launcher notices that it did not run itself.
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

from torchtitan_rl.run import job_processes
from torchtitan_rl.run.rank_status import (
    SHOW_STACKS,
    RankStatus,
    describe_stragglers,
    is_stopped_here,
    name_ranks,
    read_statuses,
    stacks_file_path,
    status_file_path,
    stragglers,
)

STARTING_NOTICE_S, STARTING_LIMIT_S = 600.0, 7200.0
"""Least notice and limit for phases before the first step. A warm start or a download may take long and shows its own progress."""

ENDING_LIMIT_S = 600.0
"""Seconds that a rank may take after its training to write the report and to close its engine."""

SLOWER = 3.0
"""A phase is late after this many times the longest time without progress that this run has had in it, but never before the
notice. Of a phase that has never ended in this run, the longest of all phases counts: the machine and the model set the pace."""

PUBLISH_EVERY_S = 5.0
SILENT_NODE_S, SILENT_NODE_ENDS_S = 30.0, 180.0
"""Seconds without news from another node's launcher until it is reported, and until this node's part of the job ends."""

STACK_LINES = 14
"""Lines of the main thread's stack on the terminal, innermost frame first. The run folder's logs/ have all threads."""


@dataclass(frozen=True)
class _NodeReport:
    """The latest report of another node's launcher."""

    at: float
    """Time at which it was written, by that node's calendar clock. Tells one report from the next."""
    received: float
    """Time at which it was read, by this node's monotonic clock, like `since` of its statuses."""
    statuses: list[RankStatus]
    ended: str
    current: bool
    """Whether it is from this job, and not left over from an earlier one."""


class Watchdog:
    """Checks the statuses of all ranks, about once a second."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self._longest: dict[str, float] = {}
        self._seen: dict[int, RankStatus] = {}
        self._reported: dict[tuple[int, int], float] = {}
        self._silent_nodes: set[str] = set()
        self._lost = ""
        self._node_reports: dict[str, _NodeReport] = {}
        self._began = time.time()
        self._published_at = 0.0
        self._resumed_at = 0.0
        self._own_report: Path | None = None
        self._published: list[RankStatus] = []

    def resume(self, now: float) -> None:
        """Count from `now` on how long ranks make no progress: the launcher itself did not run, so most likely the whole job did not."""
        self._resumed_at = now

    def check(self, now: float) -> str:
        """Report late ranks. Returns why the job must end, or "" if it may continue."""
        # The launcher reports dead ranks.
        local = [
            status for status in read_statuses(self.folder) if job_processes.is_alive(status.pid)
        ]
        ranks = local + self._remote_ranks(local, now)
        for status in ranks:
            self._record_duration(status)
        running = [status for status in ranks if not status.outcome] or local
        if not local or not running or self._lost:
            return self._lost
        slow = stragglers(running)
        waited = now - max(self._resumed_at, *(status.quiet_since for status in slow))
        if waited > _limit(slow[0]):
            in_a_step = _in_a_step(slow[0]) and not slow[0].outcome
            name = "watchdog.limit_seconds" if in_a_step else "the limit of this phase"
            return (
                f"{describe_stragglers(running, now)}: longer than {name} ({_limit(slow[0]):.0f} s)"
            )
        key = (slow[0].rank, slow[0].changes)
        if waited > max(self._deadline(slow[0]), 2 * self._reported.get(key, 0.0)):
            self._reported[key] = waited
            self._report(slow, running, now)
        return ""

    def _deadline(self, first: RankStatus) -> float:
        """Seconds after which a rank is late in its phase."""
        if is_stopped_here(first):
            return first.notice_s
        notice = first.notice_s if _in_a_step(first) else max(first.notice_s, STARTING_NOTICE_S)
        longest = self._longest.get(_kind(first.phase), max(self._longest.values(), default=0.0))
        return max(notice, min(SLOWER * longest, _limit(first) / 2))

    def _record_duration(self, status: RankStatus) -> None:
        before = self._seen.get(status.rank)
        if (
            before is not None
            and before.quiet_since != status.quiet_since
            and before.pid == status.pid
        ):
            kind = _kind(before.phase)
            self._longest[kind] = max(
                self._longest.get(kind, 0.0), status.quiet_since - before.quiet_since
            )
        self._seen[status.rank] = status

    def _report(self, slow: list[RankStatus], running: list[RankStatus], now: float) -> None:
        self.say(
            f"watchdog: {describe_stragglers(running, now)}; the job is ended at {_limit(slow[0]):.0f} s"
        )
        for status in [
            status for status in slow if status_file_path(self.folder, status.rank).exists()
        ][:4]:
            self.say(_process_report(status, self.folder))

    def _remote_ranks(self, local: list[RankStatus], now: float) -> list[RankStatus]:
        """The ranks of other nodes, from their launchers' reports; also publishes this node's. [] on one node."""
        if not local or local[0].all_here or not local[0].run_folder:
            return []
        shared = Path(local[0].run_folder) / "logs" / "nodes"
        own = shared / f"{local[0].host}-{os.getpid()}.json"
        if now - self._published_at > PUBLISH_EVERY_S:
            self._published_at, self._own_report, self._published = now, own, local
            self._publish(now)
        for path in set(shared.glob("*.json")) - {own}:
            self._read_report(path, now)
        current = {node: report for node, report in self._node_reports.items() if report.current}
        found: dict[int, RankStatus] = {}
        for report in sorted(
            current.values(), key=lambda report: report.received
        ):  # a rank that moved: the later one
            found |= {status.rank: status for status in report.statuses}
        for node, report in current.items():
            self._check_silence(
                node,
                [s for s in report.statuses if found[s.rank] is s],
                now - max(report.received, self._resumed_at),
            )
            if report.ended:
                self._lost = f"node {node} has ended: {report.ended}"
        return [status for rank, status in found.items() if rank not in {s.rank for s in local}]

    def _read_report(self, path: Path, now: float) -> None:
        """Store another node's report if it is new."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # not readable at the moment
            content = json.loads(path.read_text())
            before = self._node_reports.get(path.stem)
            if before is not None and before.at == content["at"]:
                return
            theirs = [RankStatus(**status) for status in content["statuses"]]
            shift = now - content["sent"]
            statuses = [
                replace(
                    status,
                    since=status.since + shift,
                    advanced=status.advanced and status.advanced + shift,
                )
                for status in theirs
            ]
            current = before is not None or content["at"] > self._began
            self._node_reports[path.stem] = _NodeReport(
                content["at"], now, statuses, content["ended"], current
            )

    def publish_end(self, why: str) -> None:
        """Let the other nodes know that this one has ended, so that they do not wait for it."""
        if self._own_report is not None:
            self._publish(time.monotonic(), why)

    def _publish(self, now: float, ended: str = "") -> None:
        statuses = [asdict(status) for status in self._published]
        content = {"at": time.time(), "sent": now, "statuses": statuses, "ended": ended}
        with suppress(OSError):
            self._own_report.parent.mkdir(parents=True, exist_ok=True)
            new = self._own_report.with_suffix(".new")
            new.write_text(json.dumps(content))
            new.replace(self._own_report)

    def _check_silence(self, node: str, statuses: list[RankStatus], seconds: float) -> None:
        running = [status for status in statuses if not status.outcome]
        if not running or seconds < SILENT_NODE_S:
            return
        text = f"no news from {name_ranks(running)} on node {node} for {seconds:.0f} s"
        if node not in self._silent_nodes:
            self._silent_nodes.add(node)
            self.say(f"watchdog: {text}; the job is ended at {SILENT_NODE_ENDS_S:.0f} s")
        if seconds > SILENT_NODE_ENDS_S:
            self._lost = text


def _in_a_step(status: RankStatus) -> bool:
    return status.phase.startswith("step ")


def _limit(status: RankStatus) -> float:
    """Seconds that a rank may stay in its phase until the job is ended."""
    if status.outcome:
        return ENDING_LIMIT_S
    return status.limit_s if _in_a_step(status) else max(status.limit_s, STARTING_LIMIT_S)


def _kind(phase: str) -> str:
    """A phase without its step's number: "step: grade" for "step 12: grade"."""
    return re.sub(r"^step \d+", "step", phase)


def _process_report(status: RankStatus, folder: Path) -> str:
    """The state of a rank's process, and its stack if it can still write it."""
    rank = f"rank {status.rank} (pid {status.pid} on {status.host}"
    if job_processes.is_stopped(status.pid):
        return f"rank {status.rank} is stopped by a signal: kill -CONT {status.pid} on {status.host} lets it go on"
    if not job_processes.is_alive(status.pid):
        return f"{rank}) is dead"
    in_kernel = job_processes.state(status.pid) == "D"
    waits = ", in the kernel, as on a disk or a device that does not answer" if in_kernel else ""
    return f"{rank}{waits}) is at:\n{stack_of(status, folder)}"


def stack_of(status: RankStatus, folder: Path) -> str:
    """Make the rank write its stacks. Returns the innermost frames of its main thread, and the file with the rest."""
    file = stacks_file_path(folder, status.rank)
    if not file.exists():
        return "  (it does not show its stacks)"
    begin = file.stat().st_size
    job_processes.send_signal(status.pid, SHOW_STACKS)
    time.sleep(0.5)
    written = file.read_text()[begin:]
    if not written:
        return "  (it does not answer)"
    threads = written.strip().split("\n\n")
    main = next((t for t in threads if t.startswith("Current thread")), threads[-1]).splitlines()
    kept = ""
    if status.run_folder:
        with suppress(OSError):
            shutil.copy(
                file, target := Path(status.run_folder) / "logs" / f"stacks_rank_{status.rank}.txt"
            )
            kept = f"\n  (all threads: {target})"
    more = f"\n  ... {len(main) - STACK_LINES} more" if len(main) > STACK_LINES else ""
    return "\n".join(main[1 : STACK_LINES + 1]) + more + kept
