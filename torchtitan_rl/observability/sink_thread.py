"""Runs a sink apart from training: its own thread, a bounded queue, and no further writes after a permanent error."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torchtitan_rl.observability.sinks.base import Mode, Sink, StepRecord

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One operation on the sink, and the number of table rows lost if it is dropped."""

    run: Callable[[Sink], int | None] | None
    """Returns the number of rows that the sink left out. None instead of a function: close the sink."""
    rows: int = 0


class SinkThread:
    """Builds a sink and writes to it on a background thread.

    The training thread only puts jobs on a bounded queue. When `most` jobs are waiting, the next one is dropped and its
    rows are counted. An exception in the sink's constructor or in a write disables the sink and logs one error. A
    sink with `survives_full_disk` survives an OSError: the write is lost and counted.
    """

    def __init__(self, name: str, build: Callable[[], Sink], most: int, mode: Mode = "global_reduce") -> None:
        self.name, self.mode = name, mode
        self.dropped_rows = 0
        """Table rows that the sink did not write, because it was too slow, full or disabled."""
        self.dropped_writes = 0
        """Steps that the sink did not write."""
        self.disabled = False
        """True after an error that ended the sink."""
        self._build, self._most = build, most
        self._failing = False  # whether the last write raised an OSError
        self._queue: queue.Queue[Job] = queue.Queue()
        self._positioned = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def submit(self, record: StepRecord) -> None:
        """Queues one step for the sink. Returns immediately; never raises."""
        self.put(Job(lambda sink: sink.write(record), record.num_rows))

    def begin(self, step: int) -> None:
        """Before the session's first step: queues the removal of what earlier sessions wrote for `step` and later steps."""
        if not self._positioned:
            self._positioned = True
            self._queue.put(Job(lambda sink: sink.rewind(step)))

    def drain(self, timeout_s: float) -> bool:
        """Waits until the queue is written, at most `timeout_s` seconds. Returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and not self.disabled:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return not self.disabled

    def finish(self) -> None:
        """Queues the sink's close, after all waiting writes. Returns immediately."""
        self._queue.put(Job(None))

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end after `finish`; gives up on a sink that takes longer than `timeout_s` seconds."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self.disabled:
            waiting = self._queue.unfinished_tasks - 1
            logger.error(f"sink {self.name}: still busy at the end of the run; {waiting} waiting writes are lost")

    def put(self, job: Job) -> None:
        """Queues one operation, or drops it if the queue is full or the sink disabled. Returns immediately; never raises."""
        if not self.disabled and self._queue.qsize() < self._most:
            self._queue.put(job)
            return
        self._drop(job.rows)
        if self.dropped_writes == 1 and not self.disabled:
            logger.warning(
                f"sink {self.name}: too slow, {self._most} writes are waiting; new writes are dropped until it catches "
                "up. Lost rows are counted in obs/dropped_rows."
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
            sink.close()
            self._queue.task_done()
        except BaseException as error:
            self.disabled = True
            logger.error(
                f"sink {self.name} is disabled for the rest of this run; training continues without it. "
                f"{type(error).__name__}: {error}",
                exc_info=None if isinstance(error, OSError) else error,
            )
            self._drop(job.rows)
            while not self._queue.empty():
                self._drop(self._queue.get().rows)

    def _write(self, sink: Sink, job: Job) -> None:
        try:
            left_out = job.run(sink)
        except OSError as error:
            if not sink.survives_full_disk:
                raise
            if not self._failing:
                logger.warning(f"sink {self.name}: {error}. Steps are lost until it can write again")
            self._failing = True
            self._drop(job.rows)
            return
        if self._failing:
            logger.warning(f"sink {self.name} writes again: {self.dropped_writes} writes are lost")
        self._failing = False
        with self._counting:
            self.dropped_rows += left_out or 0
