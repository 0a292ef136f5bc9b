"""`metrics.jsonl` in the run folder: one JSON object a step."""

from typing import Any

from torchtitan_rl.observability.line_file import LineFile
from torchtitan_rl.observability.rows import plain
from torchtitan_rl.observability.sinks.base import Sink, SinkContext, StepRecord


class JsonlSink(Sink):
    """`{"step": 3, "time": 1763640000.0, "reward/mean": 0.5, ...}` a line; per rank in `metrics.rank0.jsonl` and so on.

    Every series is in it, whatever `slim` leaves out of the charts. Streaming, a line is
    `{"step": 3, "key": "loss", "value": 0.5}`, in the order of the calls.
    """

    modes = ("global_reduce", "per_rank_reduce", "per_rank_no_reduce")

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._file = LineFile(context.run_folder / f"metrics{context.suffix}.jsonl", end=b"\n")

    def write(self, record: StepRecord) -> None:
        self._file.append(record.step, [{"time": record.time_s, **record.values}])

    def stream(self, key: str, value: Any, step: int) -> None:
        self._file.append(step, [{"key": key, "value": plain(value)}])

    def rewind(self, step: int) -> None:
        self._file.rewind(step)

    def close(self) -> None:
        self._file.close()
