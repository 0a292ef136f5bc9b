"""The TensorBoard sink: event files in `tensorboard/` of the run folder."""

import html
from typing import Any

from torchtitan_rl.observe.cell_text import compact_number, flat_cell, utf8
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.sinks.base import Sink, SinkContext, StepRecord
from torchtitan_rl.text import head_and_tail

MAX_CELL_CHARACTERS = 4000
"""Longer cells are shortened to head and tail. The local store has the full text."""

READ_FIRST = ("prompt", "response", "expected_answer", "answer", "reward", "advantage")
"""The first lines of a sample table."""


class TensorboardSink(Sink):
    """Writes scalars, histograms, and sample tables as markdown.

    After a resume, TensorBoard itself purges repeated steps when it reads them.
    """

    requires = "tensorboard"

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        from torch.utils.tensorboard import SummaryWriter

        self._new_writer = SummaryWriter
        self._writer: SummaryWriter | None = None

    def write(self, record: StepRecord) -> None:
        writer = self._open(record.step)
        for key, value in record.values.items():
            writer.add_scalar(key, value, record.step, walltime=record.time_s)
        for key, values in record.distributions.items():
            writer.add_histogram(f"{key}/histogram", values, record.step, walltime=record.time_s)
        for key, rows in record.tables.items():
            writer.add_text(key, _markdown(rows), record.step, walltime=record.time_s)
        writer.flush()

    def rewind(self, step: int) -> None:
        """Hides what was written after `step`."""
        self._open(step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            folder = self.context.run_folder / "tensorboard"
            self._writer = self._new_writer(str(folder), purge_step=step)
        return self._writer


def _markdown(rows: list[Row]) -> str:
    """A markdown table with a line for each column and a column for each sample: 25 columns would be too narrow."""
    present = dict.fromkeys(column for row in rows for column in row)
    columns = [c for c in READ_FIRST if c in present] + [c for c in present if c not in READ_FIRST]
    titles = [row.get("select_reason") or f"row {i + 1}" for i, row in enumerate(rows)]
    lines = [["", *map(_cell, titles)], ["---"] * (len(rows) + 1)]
    # Beside long texts TensorBoard would break a name after every few letters, were it not in <pre>.
    lines += [
        [f"<pre>{_cell(column)}</pre>", *(_cell(row.get(column)) for row in rows)]
        for column in columns
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Any) -> str:
    """One cell, escaped for markdown and HTML."""
    text = head_and_tail(utf8(compact_number(flat_cell(cell))), MAX_CELL_CHARACTERS)
    text = html.escape(text).replace("\x00", "\\x00")
    text = "".join(f"&#{ord(c)};" if c in "|*_`[]\\~#" else c for c in text)
    return text.replace("\r", "").replace("\n", "<br>")
