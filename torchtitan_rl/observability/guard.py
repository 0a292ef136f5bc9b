"""Keeps a sink away from training: its own thread, a bounded queue, and an end at its first error."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torchtitan_rl.observability.sinks.base import Sink, StepRecord

logger = logging.getLogger(__name__)

_STOP = object()


class Guard:
    """Builds a sink and writes to it on a background thread.

    The training thread only puts records on a bounded queue: a full queue drops the record and counts its rows. Any
    exception, in the sink's construction or in a write, disables that sink after one error in the log.
    """

    def __init__(self, name: str, build: Callable[[], Sink], queue_size: int) -> None:
        self.name = name
        self.dropped_rows = 0
        """Table rows that never reached the sink, because it was too slow or had been disabled."""
        self.dropped_records = 0
        """Step records that never reached the sink."""
        self.errors = 0
        self._build = build
        self._queue: queue.Queue[Any] = queue.Queue(queue_size)
        self._positioned = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    @property
    def disabled(self) -> bool:
        """True once an error has ended the sink."""
        return self.errors > 0

    def submit(self, record: StepRecord) -> None:
        """Hands one step to the sink. Returns at once; never raises.

        The first step of a session that resumed from nothing begins the run again: earlier sessions' steps from there
        on are forgotten.
        """
        if not self._positioned:
            self.rewind(record.step)
        if self.disabled or not self._put(record.write_to):
            self._drop(record)

    def stream(self, key: str, value: Any, step: int) -> None:
        """Hands one unreduced value to the sink. Returns at once; never raises."""
        if not self.disabled and not self._put(lambda sink: sink.stream(key, value, step)):
            self.dropped_records += 1

    def rewind(self, step: int) -> None:
        """Has the sink forget what it wrote of `step` and later: training resumes there."""
        self._positioned = self._put(lambda sink: sink.rewind(step))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything handed over is written. False: it is not, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and not self.disabled:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return not self.disabled

    def close(self, timeout_s: float) -> None:
        """Writes what waits and closes the sink, in `timeout_s` seconds at most: a stuck sink is left behind."""
        deadline = time.monotonic() + timeout_s
        while not self.disabled and not self._put(_STOP) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self.disabled:
            logger.error(
                f"sink {self.name}: still busy after {timeout_s:.0f} s; left behind with "
                f"{self._queue.unfinished_tasks} writes waiting"
            )

    def _put(self, task: Any) -> bool:
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            return False
        return True

    def _drop(self, record: StepRecord) -> None:
        with self._counting:
            self.dropped_records += 1
            self.dropped_rows += record.num_rows
        if self.dropped_records == 1 and not self.disabled:
            logger.warning(
                f"sink {self.name}: too slow, {self._queue.maxsize} writes are waiting; step {record.step} is not "
                "written to it. Further drops are counted in obs/dropped_rows."
            )

    def _run(self) -> None:
        task: Any = None
        try:
            sink = self._build()
            while (task := self._queue.get()) is not _STOP:
                left_out = task(sink)
                with self._counting:
                    self.dropped_rows += left_out or 0
                self._queue.task_done()
            sink.close()
            self._queue.task_done()
        except BaseException as error:
            self.errors += 1
            logger.error(
                f"sink {self.name} is disabled for the rest of this run; training goes on without it. "
                f"{type(error).__name__}: {error}",
                exc_info=error,
            )
            self._count_lost(task)

    def _count_lost(self, task: Any) -> None:
        """Counts the record that was being written, and those that wait."""
        while True:
            record = getattr(task, "__self__", None)
            if isinstance(record, StepRecord):
                self._drop(record)
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                return
