"""File sinks that survive kill -9 and resume: `metrics.jsonl`, and `samples.jsonl`, which is always written."""

import logging
from typing import Any

from torchtitan_rl.observe.line_file import LineFile
from torchtitan_rl.observe.sample_rows import plain
from torchtitan_rl.observe.sinks.base import Sink, SinkContext, StepRecord
from torchtitan_rl.observe.store import END_OF_BATCH, STORE_FILE
from torchtitan_rl.observe.tokens import TOKENS, with_written_tokens

logger = logging.getLogger(__name__)


class _FileSink(Sink):
    """Append-only files; each step in them is complete or absent."""

    waits_for_disk = True

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._files: list[LineFile] = []

    def open(self, name: str, end: bytes) -> LineFile:
        """Opens a file of the run's folder."""
        self._files.append(LineFile(self.context.run_folder / name, end))
        return self._files[-1]

    def rewind(self, step: int) -> None:
        for file in self._files:
            file.rewind(step)

    def close(self) -> None:
        for file in self._files:
            file.close()


class JsonlSink(_FileSink):
    """Writes one line per step, such as `{"step": 3, "time": 1763640000.0, "reward/mean": 0.5, ...}`.

    Per rank, the files are `metrics.rank0.jsonl`
    and so on, and the rank's selected rows are in `samples.rank0.jsonl`. When streaming, each value is a line `{"step": 3, "key": "loss", "value": 0.5}`, in call order.
    """

    modes = ("global_reduce", "per_rank_reduce", "per_rank_no_reduce")

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._file = self.open(f"metrics{context.suffix}.jsonl", b"\n")
        of_rank = (
            context.mode == "per_rank_reduce"
        )  # otherwise the local sink writes the rows of all ranks
        self._rows = self.open(f"samples{context.suffix}.jsonl", END_OF_BATCH) if of_rank else None

    def write(self, record: StepRecord) -> None:
        self._file.append(record.step, [{"time": record.time_s, **record.values}])
        rows = [{"table": key, **row} for key, table in record.tables.items() for row in table]
        if rows and self._rows is not None:
            self._rows.append(record.step, rows)

    def stream(self, key: str, value: Any, step: int) -> None:
        """Writes one value, or rows without their tokens, which are only computed for rows that are shown."""
        if isinstance(value, list):
            value = [
                {column: cell for column, cell in row.items() if column != TOKENS} for row in value
            ]
        self._file.append(step, [{"key": key, "value": plain(value)}])


class LocalSink(_FileSink):
    """Writes one line per row of a sample table, with its full text. At the byte budget it warns and stops.

    Read the file with `read_samples(run_folder)`.
    """

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._file = self.open(STORE_FILE, END_OF_BATCH)
        self._full = False

    def write(self, record: StepRecord) -> int:
        """Returns the number of rows dropped because of the byte budget."""
        run_id, budget = self.context.run_id, self.context.config.store_bytes
        rows = [
            {"run_id": run_id, "table": key, **with_written_tokens(row, self.context.decode)}
            for key, table in record.kept.items()
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
