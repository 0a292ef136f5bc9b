"""The Trackio sink: scalars, tables, and rollouts as traces, stored locally. `trackio show` opens the dashboard."""

from typing import Any

from torchtitan_rl.observe.cell_text import flat_cell
from torchtitan_rl.observe.sample_rows import Row, messages_of
from torchtitan_rl.observe.select import is_shown
from torchtitan_rl.observe.sinks.base import PROJECT, Sink, SinkContext, StepRecord
from torchtitan_rl.observe.tokens import TOKENS

TRACES = "rollout/traces"
IN_MESSAGES = ("prompt", "messages", "response", "conversation", TOKENS)
"""Columns that a trace has as messages. The others are its metadata."""


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
        logged: dict[str, Any] = dict(record.values)
        for key, values in record.distributions.items():
            logged[f"{key}/histogram"] = self._trackio.Histogram(values)
        for key, rows in record.tables.items():
            logged[key] = self._trackio.Table(data=[_flat(row) for row in rows])
        if rollouts := self._rollouts(record):
            logged[TRACES] = [self._trace(row) for row in rollouts]
        self._run.log(logged, step=record.step)

    def close(self) -> None:
        self._run.finish()

    def _rollouts(self, record: StepRecord) -> list[Row]:
        """The stored samples with a response, up to `max_traces_per_step` of each split, the selected ones first."""
        splits: dict[str, list[Row]] = {}
        rows = [row for rows in record.stored.values() for row in rows if "response" in row]
        for row in sorted(rows, key=lambda row: not is_shown(row)):
            splits.setdefault(str(row.get("split")), []).append(row)
        most = self.context.config.max_traces_per_step
        return [row for members in splits.values() for row in members[:most]]

    def _trace(self, row: Row) -> Any:
        messages = [_flat(message) for message in messages_of(row)]
        others = {column: cell for column, cell in row.items() if column not in IN_MESSAGES}
        return self._trackio.Trace(messages=messages, metadata=_flat(others))


def _flat(row: Row) -> Row:
    return {column: flat_cell(cell) for column, cell in row.items()}
