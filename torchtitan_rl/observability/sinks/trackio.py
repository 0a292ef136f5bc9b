"""Trackio, local first: scalars, tables, and rollouts as traces. `trackio show` opens the dashboard."""

from typing import Any

from torchtitan_rl.observability.rows import Row
from torchtitan_rl.observability.sinks.base import Sink, SinkContext, StepRecord
from torchtitan_rl.observability.text import flat_cell, utf8


class TrackioSink(Sink):
    """Logs through the `Run` it made: Trackio's current run is a context variable, which other threads do not see.

    At most `max_traces_per_step` traces a training step, however many flushes the step has. The database is in
    TRACKIO_DIR, by default in the Hugging Face cache.
    """

    modes = ("global_reduce", "per_rank_reduce")
    requires = "trackio"

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=context.config.project,
            name=f"{context.run_name}-{context.run_id}{context.suffix}",
            group=context.run_name if context.suffix else None,
            config=context.run_config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._traced = (-1, 0)

    def write(self, record: StepRecord) -> None:
        logged: dict[str, Any] = dict(record.values)
        for key, values in record.distributions.items():
            if len(values):
                logged[f"{key}/histogram"] = self._trackio.Histogram(list(values))
        for key, rows in record.tables.items():
            if rows:
                data = [{column: flat_cell(cell) for column, cell in row.items()} for row in rows]
                logged[key] = self._trackio.Table(data=data)
        step, count = self._traced
        count = count if step == record.step else 0
        traces = record.traces[: max(0, self.context.config.max_traces_per_step - count)]
        self._traced = (record.step, count + len(traces))
        if traces:
            logged[self.context.config.trace_key] = [self._trace(row, record.step) for row in traces]
        self._run.log(logged, step=record.step)

    def close(self) -> None:
        self._run.finish()

    def _trace(self, row: Row, step: int) -> Any:
        messages = row.get("messages") or [{"role": "user", "content": str(row.get("prompt", ""))}]
        messages = [{name: flat_cell(cell) for name, cell in message.items()} for message in messages]
        messages.append({"role": "assistant", "content": utf8(str(row.get("response", "")))})
        split, prompt, sample = row.get("split"), row.get("prompt_idx"), row.get("sample_idx")
        metadata = {
            "step": step,
            "split": split,
            "policy_version": row.get("policy_version"),
            "staleness": row.get("staleness"),
            "sample_index": sample,
            "prompt_index": prompt,
            "reward": flat_cell(row.get("reward", row.get("score"))),
            "advantage": row.get("advantage"),
            "stop_reason": row.get("finish_reason"),
            "trajectory_id": f"{self.context.run_id}/{step}/{split}/{prompt}/{sample}",
        }
        return self._trackio.Trace(messages=messages, metadata=metadata)
