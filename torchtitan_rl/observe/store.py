"""Reads a run's stored samples: `samples.jsonl` in the run folder, and those of a step that failed."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from torchtitan_rl.observe.line_file import read_lines
from torchtitan_rl.observe.sample_rows import Row

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
