"""Runs a sink apart from training: its own thread, a bounded queue, and no further writes after a permanent error."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from torchtitan_rl.observe.sinks.base import Sink, StepRecord

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Time between two attempts to write to a full disk."""


class SinkThread:
    """Builds a sink and writes to it on a background thread.

    The training thread only puts steps on a bounded queue. When `most` steps are waiting, the next one is dropped and its
    rows are counted. An exception in the sink's constructor or in a write disables the sink and logs one error. A
    sink with `waits_for_disk` tries again after an OSError until the run ends.
    """

    def __init__(self, name: str, build: Callable[[], Sink], most: int) -> None:
        self.name = name
        self.dropped_rows = 0
        """Table rows that the sink did not write, because it was too slow, full or disabled."""
        self.dropped_steps = 0
        """Steps that the sink did not write."""
        self.disabled = False
        """True after an error that ended the sink."""
        self._build, self._most = build, most
        self._queue: queue.Queue[StepRecord | None] = queue.Queue()  # None: close the sink
        self._finishing = threading.Event()
        self._has_rewound = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def submit(self, record: StepRecord) -> None:
        """Queues one step, or drops it if the queue is full or the sink disabled. Returns immediately; never raises."""
        if not self.disabled and self._queue.qsize() < self._most:
            self._queue.put(record)
            return
        self._drop(record.num_rows, steps=1)
        if self.dropped_steps == 1 and not self.disabled:
            logger.warning(
                f"sink {self.name}: too slow, {self._most} steps are waiting; new steps are dropped until it catches "
                "up. Lost rows are counted in obs/dropped_rows."
            )

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
        self._queue.put(None)
        self._finishing.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end after `finish`; gives up on a sink that takes longer than `timeout_s` seconds."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            waiting = self._queue.unfinished_tasks - 1
            logger.error(
                f"sink {self.name}: still busy at the end of the run; {waiting} waiting steps are lost"
            )

    def _drop(self, rows: int, *, steps: int) -> None:
        with self._counting:
            self.dropped_rows += rows
            self.dropped_steps += steps

    def _run(self) -> None:
        record: StepRecord | None = None
        try:
            sink = self._build()
            while (record := self._queue.get()) is not None:
                self._write(sink, record)
                self._queue.task_done()
            sink.close()
            self._queue.task_done()
        except BaseException as error:
            self.disabled = True
            waiting = [record]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            lost = [step for step in waiting if step is not None]
            self._drop(sum(step.num_rows for step in lost), steps=len(lost))
            logger.error(
                f"sink {self.name} is disabled for the rest of this run; training continues without it. "
                f"{len(lost)} waiting steps are lost. {type(error).__name__}: {error}",
                exc_info=None if isinstance(error, OSError) else error,
            )

    def _write(self, sink: Sink, record: StepRecord) -> None:
        """Writes a step, where the sink can wait for the disk until there is space. Its first step removes later ones of earlier sessions."""
        waited = False
        while True:
            try:
                if not self._has_rewound:
                    sink.rewind(record.step)
                    self._has_rewound = True
                self._drop(sink.write(record) or 0, steps=0)
                break
            except OSError as error:
                if not sink.waits_for_disk or self._finishing.is_set():
                    raise
                if not waited:
                    logger.warning(f"sink {self.name}: {error}. It waits until it can write again")
                waited = True
                self._finishing.wait(RETRY_SECONDS)
        if waited:
            lost = f"{self.dropped_steps} steps are lost so far"
            logger.warning(f"sink {self.name} writes again; {lost}")
