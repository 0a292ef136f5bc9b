"""Names the rank that stands still, with its stack, and says when the job must end. The launcher calls it.

A pause of the whole job (SIGSTOP, `docker pause`, a clock that jumps) counts for no rank: the launcher did not run either. A
laptop's sleep stops the monotonic clock.
"""

import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchtitan_rl.run import job_processes
from torchtitan_rl.run.rank_status import (
    SHOW_STACKS,
    RankStatus,
    describe,
    has_vanished,
    is_stopped,
    named,
    read_statuses,
    stacks_path,
    stragglers,
)

PAUSED_S = 10.0
"""Seconds between two looks, one apart if all runs, that mean that the job was paused."""
GRACE_S = 8.0
"""Seconds that a node's other ranks have to end after one has vanished."""
STACK_LINES = 14
"""Lines of a thread's stack on the terminal, innermost frame first."""
_CALL = re.compile(
    r'.*\n(?!  File ".*/(threading|selectors)\.py")(?s:.*)environments/threads\.py", line \d+ in _run'
)
"""The stack of a thread in an environment or a tool that does not wait there without the interpreter's lock."""


class Watchdog:
    """Looks at the statuses of this node's ranks."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._looked = self._resumed = time.monotonic()
        self._reported: tuple[int, int] | None = None
        self._reported_s = 0.0
        self._vanished_at: float | None = None
        self.hung: RankStatus | None = None
        """The rank that stood still when the watchdog ended the job."""
        self.reason = ""
        """Why the watchdog ended the job, with that rank's stack."""

    def look(self, now: float) -> None:
        """Report late ranks. Kill the node's ranks if one is over its limit, or if one vanished and the others stay."""
        if now - self._looked > PAUSED_S:
            self._resumed = now
        self._looked = now
        statuses = read_statuses(self._folder)
        if any(has_vanished(status) for status in statuses):
            # One that waits in NCCL for it does not notice it, and torchrun takes a rank that ended with code 0 for finished.
            self._vanished_at = self._vanished_at or now
            if now - self._vanished_at > GRACE_S:
                _kill(statuses)
            return
        alive = [status for status in statuses if job_processes.is_alive(status.pid)]
        running = [status for status in alive if not status.outcome] or alive
        slow = stragglers(running)
        if not slow or self.hung:
            return
        quiet_s = now - max(self._resumed, *(status.progressed for status in slow))
        text = f"watchdog: {describe(running, now)}"
        if quiet_s > slow[0].limit_s:
            text += f": longer than the limit ({slow[0].limit_s:.0f} s, in a step watchdog.limit_seconds); the job is ended"
            self._say(text)
            self.hung, self.reason = slow[0], f"{text}\n{self._where(slow[0])}"
            _kill(statuses)
            return
        key = (slow[0].rank, slow[0].changes)
        if key != self._reported:
            self._reported, self._reported_s = key, 0.0
        if quiet_s > max(slow[0].notice_s, 2 * self._reported_s):
            self._reported_s = quiet_s
            self._say(f"{text}; the job is ended at {slow[0].limit_s:.0f} s")
            for status in slow[:4]:
                self._say(self._where(status))

    def _where(self, status: RankStatus) -> str:
        """Where a rank stands: that a signal has stopped it, or the innermost frames of its main thread and of an environment's."""
        if is_stopped(status):
            return f"rank {status.rank} is stopped by a signal: kill -CONT {status.pid} on {status.host} lets it go on"
        file = stacks_path(self._folder, status.rank)
        threads = [""]
        with suppress(OSError):  # what cleans /tmp up may have removed the file of a long run
            begin = file.stat().st_size
            job_processes.send_signal(status.pid, SHOW_STACKS)
            time.sleep(0.5)
            threads = file.read_text()[begin:].strip().split("\n\n")
        main = next((text for text in threads if text.startswith("Current thread")), threads[-1])
        lines = main.splitlines()[1 : 1 + STACK_LINES] or ["  (it does not show its stack)"]
        for text in list(filter(_CALL.match, threads))[:3]:
            lines += ["  an environment or tool, which may hold the interpreter's lock, is at:"]
            lines += text.splitlines()[1 : 1 + STACK_LINES]
        if status.run_folder:
            with suppress(OSError):
                copy = shutil.copy(file, Path(status.run_folder) / "logs")
                lines.append(f"  (all threads: {copy})")
        return "\n".join([f"{named([status])} is at:", *lines])


def _kill(statuses: list[RankStatus]) -> None:
    for status in statuses:
        job_processes.send_signal(status.pid, signal.SIGKILL)
