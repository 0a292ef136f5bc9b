"""The local store, always on: `samples.jsonl` in the run folder, a row of a sample table a line, with its full text."""

import logging

from torchtitan_rl.observability.line_file import LineFile
from torchtitan_rl.observability.sinks.base import Sink, SinkContext, StepRecord
from torchtitan_rl.observability.store import END_OF_BATCH, STORE_FILE

logger = logging.getLogger(__name__)


class LocalSink(Sink):
    """Append-only; a step's rows are there whole or not at all. Stops, and says so, at the byte budget.

    Read it with `read_samples(run_folder)`.
    """

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._file = LineFile(context.run_folder / STORE_FILE, END_OF_BATCH)
        self._full = False

    def write(self, record: StepRecord) -> int:
        """Returns the number of rows that the byte budget kept out."""
        rows = [
            {"run_id": self.context.run_id, "table": key, **row} for key, table in record.kept.items() for row in table
        ]
        if not rows:
            return 0
        if self._file.size >= self.context.config.store_bytes:
            if not self._full:
                logger.warning(
                    f"{STORE_FILE} has reached its budget of {self.context.config.store_bytes:,} bytes "
                    f"(metrics.store_bytes): the rows of step {record.step} and later are not kept; they are counted "
                    "in obs/dropped_rows"
                )
            self._full = True
            return len(rows)
        self._file.append(record.step, rows)
        return 0

    def rewind(self, step: int) -> None:
        self._file.rewind(step)

    def close(self) -> None:
        self._file.close()
