"""The Trackio sink: scalars, tables, and rollouts as traces, stored locally. `trackio show` opens the dashboard."""

from typing import Any

from torchtitan_rl.observe.cell_text import flat_cell
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.select import is_shown
from torchtitan_rl.observe.sinks.base import PROJECT, Sink, SinkContext, StepRecord

TRACES = "rollout/traces"
"""The key of the traces."""
_COLUMN = "example/"
"""The names of the data's columns in a row."""


class TrackioSink(Sink):
    """Logs through its own `Run`, because Trackio's current run is a context variable that other threads do not see.

    The database is in TRACKIO_DIR, by default in the Hugging Face cache.
    """

    requires = "trackio"

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=context.config.project or PROJECT,
            name=f"{context.run_name}-{context.run_id}",
            config=context.run_config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: StepRecord) -> None:
        """Logs the step's values, histograms, tables and traces."""
        logged: dict[str, Any] = dict(record.values)
        for key, values in record.distributions.items():
            logged[f"{key}/histogram"] = self._trackio.Histogram(values)
        for key, rows in record.tables.items():
            data = [{column: flat_cell(cell) for column, cell in row.items()} for row in rows]
            logged[key] = self._trackio.Table(data=data)
        if rollouts := self._rollouts(record):
            logged[TRACES] = [self._trace(row, record.step) for row in rollouts]
        self._run.log(logged, step=record.step)

    def close(self) -> None:
        self._run.finish()

    def _rollouts(self, record: StepRecord) -> list[Row]:
        """The stored samples with a response, up to `max_traces_per_step` of each split, the selected ones first."""
        splits: dict[str, list[Row]] = {}
        rows = [row for rows in record.kept.values() for row in rows if "response" in row]
        for row in sorted(rows, key=lambda row: not is_shown(row)):
            splits.setdefault(str(row.get("split")), []).append(row)
        most = self.context.config.max_traces_per_step
        return [row for members in splits.values() for row in members[:most]]

    def _trace(self, row: Row, step: int) -> Any:
        asked = row.get("messages") or [{"role": "user", "content": str(row.get("prompt", ""))}]
        said = row.get("conversation") or [
            {"role": "assistant", "content": str(row.get("response", ""))}
        ]
        messages = [
            {name: flat_cell(cell) for name, cell in message.items()} for message in [*asked, *said]
        ]
        split, prompt, sample = row.get("split"), row.get("prompt_idx"), row.get("sample_idx")
        episode_id = row.get("episode_id", f"{split}/{step}/{prompt}/{sample}")
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
            "trajectory_id": f"{self.context.run_id}/{episode_id}",
            "task": row.get("task"),
            "traces": [
                {name: flat_cell(trace[name]) for name in ("parent", "reason", "tokens")}
                for trace in row.get("traces", ())
            ],
            "expected_answer": row.get("expected_answer"),
            "example": {
                name.removeprefix(_COLUMN): cell
                for name, cell in row.items()
                if name.startswith(_COLUMN)
            },
        }
        return self._trackio.Trace(messages=messages, metadata=metadata)
