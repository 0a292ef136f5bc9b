"""Reads a run's stored samples: `samples.jsonl` in the run folder, and those of a step that failed."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.observe.cell_text import flat_cell
from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.observe.sample_rows import Row

if TYPE_CHECKING:
    import pyarrow

STORE_FILE = "samples.jsonl"
UNFINISHED_FILE = "samples.unfinished.jsonl"
"""The samples of the step in which the run failed. A resumed run removes it: it takes that step again."""
END_OF_BATCH = b" \n"
"""A step's last row ends with a space, which JSON ignores. A step without it is incomplete."""


def read_rows(run_folder: Path | str) -> Iterator[Row]:
    """Yields every stored row of the run, ordered by step, with the columns "table" and "run_id" added.

    Rows of a step that failed come last and have the column "unfinished". Safe during the run. Raises FileNotFoundError if the folder is not a run or has no stored samples.
    """
    paths = [Path(run_folder) / name for name in (STORE_FILE, UNFINISHED_FILE)]
    if not any(path.exists() for path in paths):
        expected = "expected the folder of a run that has recorded sample tables"
        raise FileNotFoundError(f"{paths[0]} does not exist: {expected}")
    return itertools.chain.from_iterable(read_lines(path, END_OF_BATCH) for path in paths)


def read_samples(run_folder: Path | str, table: str | None = None) -> "pyarrow.Table":
    """Returns the run's stored rows as one pyarrow table (`.to_pandas()` for pandas), with the columns of all steps.

    Rows recorded before a column existed have null there. Columns of several types are text; nested cells are JSON.
    `table`: return only the rows of this table, such as "rollout/samples". Raises FileNotFoundError like `read_rows`.
    """
    import pyarrow

    rows = [row for row in read_rows(run_folder) if table is None or row["table"] == table]
    columns = dict.fromkeys(column for row in rows for column in row)
    return pyarrow.table({column: _column([row.get(column) for row in rows]) for column in columns})


def _column(cells: list[Any]) -> "pyarrow.Array":
    import pyarrow

    cells = [flat_cell(cell) for cell in cells]
    types = {type(cell) for cell in cells} - {type(None)}
    if types == {int, float}:
        cells = [cell if cell is None else float(cell) for cell in cells]
    elif len(types) > 1:
        cells = [cell if cell is None else str(cell) for cell in cells]
    return pyarrow.array(cells)
