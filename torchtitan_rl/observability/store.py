"""Reads back what the local store keeps of a run: `samples.jsonl` in its folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.observability.cell_text import flat_cell
from torchtitan_rl.observability.line_file import read_lines
from torchtitan_rl.observability.sample_rows import Row, kind_of

if TYPE_CHECKING:
    import pyarrow

STORE_FILE = "samples.jsonl"
END_OF_BATCH = b" \n"
"""A step's last row ends with a space, which JSON ignores: a step without it was cut short."""


def read_rows(run_folder: Path | str) -> Iterator[Row]:
    """Every stored row of the run as it was recorded, in the order of steps, with "table" and "run_id".

    Safe while the run goes on. Raises FileNotFoundError for a folder that is no run or has stored nothing.
    """
    path = Path(run_folder) / STORE_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: expected the folder of a run that recorded sample tables")
    return read_lines(path, END_OF_BATCH)


def read_samples(run_folder: Path | str, table: str | None = None) -> "pyarrow.Table":
    """The run's stored rows as one pyarrow table (`.to_pandas()` for pandas), with the columns of all steps.

    Rows from before a column was there have null in it. Columns of several types are text; nested cells are JSON.
    `table`: only the rows of this one, such as "rollout/samples". Raises FileNotFoundError as `read_rows`.
    """
    import pyarrow

    rows = [row for row in read_rows(run_folder) if table is None or row["table"] == table]
    columns = dict.fromkeys(column for row in rows for column in row)
    return pyarrow.table({column: _column([row.get(column) for row in rows]) for column in columns})


def _column(cells: list[Any]) -> "pyarrow.Array":
    import pyarrow

    cells = [flat_cell(cell) for cell in cells]
    kinds = {kind_of(cell) for cell in cells} - {None}
    common = None
    if len(kinds) > 1:
        common = str
    elif any(isinstance(cell, float) for cell in cells):
        common = float
    return pyarrow.array([cell if cell is None or common is None else common(cell) for cell in cells])
