"""File sinks that survive kill -9 and resume: `metrics.jsonl`, and `samples.jsonl`, which is always written."""

import logging

from torchtitan_rl.observe.line_file import LineFile
from torchtitan_rl.observe.sinks.base import Sink, SinkContext, StepRecord
from torchtitan_rl.observe.store import END_OF_BATCH, STORE_FILE
from torchtitan_rl.observe.tokens import with_written_tokens

logger = logging.getLogger(__name__)


class _FileSink(Sink):
    """An append-only file; each step in it is complete or absent."""

    waits_for_disk = True

    def __init__(self, context: SinkContext, name: str, end: bytes) -> None:
        super().__init__(context)
        self._file = LineFile(context.run_folder / name, end)

    def rewind(self, step: int) -> None:
        self._file.rewind(step)

    def close(self) -> None:
        self._file.close()


class JsonlSink(_FileSink):
    """Writes one line per step, such as `{"step": 3, "time": 1763640000.0, "reward/mean": 0.5, ...}`."""

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context, "metrics.jsonl", b"\n")

    def write(self, record: StepRecord) -> None:
        self._file.append(record.step, [{**record.values, "time": record.time_s}])


class LocalSink(_FileSink):
    """Writes one line per row of a sample table, with its full text. At the byte budget it warns and stops.

    Read the file with `read_rows(run_folder)`.
    """

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context, STORE_FILE, END_OF_BATCH)
        self._full = False

    def write(self, record: StepRecord) -> int:
        run_id, budget = self.context.run_id, self.context.config.store_bytes
        rows = [
            {**with_written_tokens(row, self.context.decode), "run_id": run_id, "table": key}
            for key, table in record.stored.items()
            for row in table
        ]
        if rows and self._file.size < budget:
            self._file.append(record.step, rows)
            return 0
        if rows and not self._full:
            self._full = True
            logger.warning(
                f"{STORE_FILE} has reached its budget of {budget:,} bytes (metrics.store_bytes): rows from step "
                f"{record.step} on are dropped and counted in obs/dropped_rows"
            )
        return len(rows)
