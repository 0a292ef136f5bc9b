"""TensorBoard event files in `tensorboard/` of the run folder."""

from typing import Any

from torchtitan_rl.observability.sinks.base import Sink, SinkContext, StepRecord


class TensorboardSink(Sink):
    """Scalars; after a resumption, what an earlier session wrote of later steps is purged when TensorBoard reads it."""

    modes = ("global_reduce", "per_rank_reduce", "per_rank_no_reduce")
    requires = "tensorboard"

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        from torch.utils.tensorboard import SummaryWriter

        self._new_writer = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._streamed: dict[str, int] = {}

    def write(self, record: StepRecord) -> None:
        if self.context.mode == "per_rank_no_reduce":
            return
        writer = self._open(record.step)
        for key, value in record.values.items():
            writer.add_scalar(key, value, record.step, walltime=record.time_s)
        writer.flush()

    def stream(self, key: str, value: Any, step: int) -> None:
        if not isinstance(value, list):
            place = self._streamed[key] = self._streamed.get(key, -1) + 1
            self._open(place).add_scalar(key, float(value), place)

    def rewind(self, step: int) -> None:
        self._open(step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            folder = self.context.run_folder / f"tensorboard{self.context.suffix}"
            self._writer = self._new_writer(str(folder), purge_step=step)
        return self._writer
