"""The TensorBoard sink: event files in `tensorboard/` of the run folder."""

import html
from typing import Any

from torchtitan_rl.observe.cell_text import compact_number, flat_cell, utf8
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.sinks.base import Sink, StepRecord
from torchtitan_rl.text import head_and_tail

MAX_CELL_CHARACTERS = 4000
"""Longer cells are shortened to head and tail. The local store has the full text."""

LARGEST_BIN = 9e19
"""TensorBoard raises if all values of a histogram are outside of its bins."""
READ_FIRST = ("prompt", "response", "expected_answer", "answer", "reward", "advantage")
"""The first lines of a sample table."""


class TensorboardSink(Sink):
    """Writes scalars, histograms, and sample tables as markdown.

    After a resume, TensorBoard itself purges repeated steps when it reads them.
    """

    requires = "tensorboard"
    _writer: Any = None

    def rewind(self, step: int) -> None:
        """Opens the event files, and hides what was written from `step` on."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.context.run_folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=step)

    def write(self, record: StepRecord) -> None:
        for key, value in record.values.items():
            self._writer.add_scalar(key, value, record.step, walltime=record.time_s)
        for key, values in record.distributions.items():
            name, shown = f"{key}/histogram", values.clip(-LARGEST_BIN, LARGEST_BIN)
            self._writer.add_histogram(name, shown, record.step, walltime=record.time_s)
        for key, rows in record.tables.items():
            self._writer.add_text(key, _markdown(rows), record.step, walltime=record.time_s)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


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
