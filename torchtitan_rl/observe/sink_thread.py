"""Runs a sink apart from training: its own thread, a bounded queue, and no further writes after a permanent error."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan_rl.observe.sinks.base import Mode, Sink, StepRecord

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
    sink with `waits_for_disk` survives an OSError: its failed writes are retried, in order, at each new write.
    """

    def __init__(
        self, name: str, build: Callable[[], Sink], most: int, mode: Mode = "global_reduce"
    ) -> None:
        self.name, self.mode = name, mode
        self.dropped_rows = 0
        """Table rows that the sink did not write, because it was too slow, full or disabled."""
        self.dropped_writes = 0
        """Steps, or streamed values, that the sink did not write."""
        self.disabled = False
        """True after an error that ended the sink."""
        self._build, self._most = build, most
        self._refused: deque[Job] = deque()  # failed with an OSError, to be retried; oldest first
        self._queue: queue.Queue[Job] = queue.Queue()
        self._positioned = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def submit(self, record: StepRecord) -> None:
        """Queues one step for the sink. Returns immediately; never raises."""
        self.put(Job(lambda sink: sink.write(record), record.num_rows))

    def stream(self, key: str, value: Any, step: int) -> None:
        """Queues one unreduced value for the sink. Returns immediately; never raises."""
        self.begin(step)
        self.put(
            Job(
                lambda sink: sink.stream(key, value, step),
                len(value) if isinstance(value, list) else 0,
            )
        )

    def begin(self, step: int) -> None:
        """Before the session's first step: queues the removal of what earlier sessions wrote for `step` and later steps."""
        if not self._positioned:
            self._positioned = True
            self._queue.put(Job(lambda sink: sink.rewind(step)))

    def drain(self, timeout_s: float) -> bool:
        """Waits until the queue is written, at most `timeout_s` seconds. Returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while (self._queue.unfinished_tasks or self._refused) and not self.disabled:
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
            logger.error(
                f"sink {self.name}: still busy at the end of the run; {waiting} waiting writes are lost"
            )

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
            if self._refused:
                self._write(sink)
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
        if self._refused:
            logger.error(
                f"sink {self.name}: {len(self._refused)} writes are lost: none of the attempts succeeded"
            )

    def _write(self, sink: Sink, *new: Job) -> None:
        """Retries the failed jobs, then runs the new one."""
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
                logger.warning(
                    f"sink {self.name}: {error}. Up to {self._most} writes wait to be retried"
                )
            if len(self._refused) > self._most:
                self._drop(self._refused.popleft().rows)
            return
        if was_refused:
            logger.warning(
                f"sink {self.name} writes again: {was_refused} writes were retried, {self.dropped_writes} are lost"
            )
