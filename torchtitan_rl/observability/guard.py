"""Keeps a sink away from training: its own thread, a bounded queue, and an end at its first error that will not pass."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan_rl.observability.sinks.base import Mode, Sink, StepRecord

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """Something to do with the sink, and how many table rows are lost when it is not done."""

    run: Callable[[Sink], int | None] | None
    """Returns how many rows it left out; None: close the sink."""
    rows: int = 0


class Guard:
    """Builds a sink and writes to it on a background thread.

    The training thread only puts jobs on a bounded queue: with `most` of them waiting, the next is dropped and its rows
    are counted. Any exception, in the sink's construction or in a write, disables that sink after one error in the log; but
    what the disk refuses to a sink with `waits_for_disk` is tried again at each write, in order.
    """

    def __init__(self, name: str, build: Callable[[], Sink], most: int, mode: Mode = "global_reduce") -> None:
        self.name, self.mode = name, mode
        self.dropped_rows = 0
        """Table rows that never reached the sink, because it was too slow, full, or had been disabled."""
        self.dropped_writes = 0
        """Steps, or streamed values, that never reached the sink."""
        self.disabled = False
        """True once an error has ended the sink."""
        self._build, self._most = build, most
        self._refused: deque[Job] = deque()  # by the disk; the oldest first
        self._queue: queue.Queue[Job] = queue.Queue()
        self._positioned = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def submit(self, record: StepRecord) -> None:
        """Hands one step to the sink. Returns at once; never raises.

        The first step of a session that resumed from nothing begins the run again: earlier sessions' steps from there
        on are forgotten.
        """
        if not self._positioned:
            self.rewind(record.step)
        self._put(Job(lambda sink: sink.write(record), record.num_rows))

    def stream(self, key: str, value: Any, step: int) -> None:
        """Hands one unreduced value to the sink. Returns at once; never raises."""
        self._put(Job(lambda sink: sink.stream(key, value, step), len(value) if isinstance(value, list) else 0))

    def rewind(self, step: int) -> None:
        """Has the sink forget what it wrote of `step` and later: training resumes there."""
        self._positioned = True
        self._queue.put(Job(lambda sink: sink.rewind(step)))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything handed over is written. False: it is not, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (self._queue.unfinished_tasks or self._refused) and not self.disabled:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return not self.disabled

    def finish(self) -> None:
        """Has the sink close once it has written what waits. Returns at once."""
        self._queue.put(Job(None))

    def join(self, timeout_s: float) -> None:
        """Waits for the end after `finish`; a sink that is stuck for `timeout_s` seconds is left behind."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self.disabled:
            waiting = self._queue.unfinished_tasks - 1
            logger.error(f"sink {self.name}: still busy at the end; left behind with {waiting} writes waiting")

    def _put(self, job: Job) -> None:
        if not self.disabled and self._queue.qsize() < self._most:
            self._queue.put(job)
            return
        self._drop(job.rows)
        if self.dropped_writes == 1 and not self.disabled:
            logger.warning(
                f"sink {self.name}: too slow, {self._most} writes are waiting; what comes now is not written to it. "
                "The rows lost are counted in obs/dropped_rows."
            )

    def _drop(self, rows: int) -> None:
        with self._counting:
            self.dropped_writes += 1
            self.dropped_rows += rows

    def _run(self) -> None:
        job = Job(None)
        try:
            sink = self._build()
            while (job := self._queue.get()).run is not None:
                self._write(sink, job)
                self._queue.task_done()
            if self._refused:
                self._write(sink)
            sink.close()
            self._queue.task_done()
        except BaseException as error:
            self.disabled = True
            logger.error(
                f"sink {self.name} is disabled for the rest of this run; training goes on without it. "
                f"{type(error).__name__}: {error}",
                exc_info=None if isinstance(error, OSError) else error,
            )
            self._drop(job.rows)
            while not self._queue.empty():
                self._drop(self._queue.get().rows)
        if self._refused:
            logger.error(f"sink {self.name}: {len(self._refused)} writes are lost, the disk refused them to the end")

    def _write(self, sink: Sink, *new: Job) -> None:
        """Do what was refused before and what is new, in order."""
        was_refused = len(self._refused)
        self._refused += new
        try:
            while self._refused:
                left_out = self._refused[0].run(sink)
                self._refused.popleft()
                with self._counting:
                    self.dropped_rows += left_out or 0
        except OSError as error:
            if not sink.waits_for_disk:
                self._refused.clear()
                raise
            if not was_refused:
                logger.warning(f"sink {self.name}: {error}. Up to {self._most} writes wait until it can write again")
            if len(self._refused) > self._most:
                self._drop(self._refused.popleft().rows)
            return
        if was_refused:
            logger.warning(
                f"sink {self.name} writes again: {was_refused} writes had waited, {self.dropped_writes} are lost"
            )
