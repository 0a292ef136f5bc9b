"""`RowSet`: the rows of a table that can be used as examples, and the reasons for leaving out the others."""

import copy
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_rl.data.row_reader import NUM_SHOWN, RowReader, row_count
from torchtitan_rl.data.table import BATCH, RowError
from torchtitan_rl.data.task import Example


class RowSet:
    """Rows of one table as examples. It holds only row indices and reads a row from the table on access."""

    def __init__(self, reader: RowReader, identity: Sequence[str] = ()) -> None:
        """Reads every row once. `identity`: columns by which rows with the same prompt are different tasks."""
        self.reader = reader
        self._identity = identity
        self.table = reader.table
        self.left_out: dict[str, list[int]] = defaultdict(list)
        """Indices of the rows left out, by reason."""
        self.kept, self.keys = self._scan()

    def example(self, place: int) -> Example:
        [row] = self.table.rows(self.kept[place : place + 1])
        return self.reader.example(row)

    def batches(self) -> Iterator[list[Example]]:
        for start in range(0, len(self.kept), BATCH):
            rows = self.table.rows(self.kept[start : start + BATCH])
            yield [self.reader.example(row) for row in rows]

    def leave_out_where(self, where: npt.NDArray[np.bool_], reason: str) -> None:
        """Leaves out the kept rows for which `where` [kept] is true."""
        if where.any():
            self.left_out[reason] += self.kept[where].tolist()
            self.kept, self.keys = self.kept[~where], self.keys[~where]

    def split_off(self, num: int, seed: int) -> "RowSet":
        """Moves `num` of the kept rows, at least one, to a new set and returns it.

        The choice and order depend only on the prompts and the seed, not on the order of the rows.
        """
        texts = (f"{seed}/{key}".encode() for key in self.keys)
        ranks = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
        order = np.array(sorted(range(len(ranks)), key=ranks.__getitem__), dtype=np.int64)
        first = order[: max(1, num)]
        # A prompt may have several demonstrations.
        chosen = order[np.isin(self.keys[order], self.keys[first])]
        other = copy.copy(self)
        other.kept, other.keys = self.kept[chosen], self.keys[chosen]
        other.left_out = defaultdict(list)
        self.kept, self.keys = np.delete(self.kept, chosen), np.delete(self.keys, chosen)
        return other

    def describe(self, what: str) -> str:
        """Returns a summary. Example: "data.jsonl: 95 rows for training; left out: 3 without an answer (rows 4, 9, 17)"."""
        kept = f"{self.table.name}: {row_count(len(self.kept))} {what}"
        left_out = [
            f"{len(indices):,} {reason} ({self._numbers(indices)})"
            for reason, indices in self.left_out.items()
        ]
        return f"{kept}; left out: {', '.join(left_out)}" if left_out else kept

    def _numbers(self, indices: list[int]) -> str:
        """Returns at most ten rows' numbers as text. Example: "rows 3, 7"."""
        numbers = ", ".join(map(self.table.number, indices[:NUM_SHOWN]))
        more = ", ..." if len(indices) > NUM_SHOWN else ""
        return f"row{'' if len(indices) == 1 else 's'} {numbers}{more}"

    def _scan(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Returns (indices, hashes of the prompts) of the rows to keep."""
        reader = self.reader
        indices: list[int] = []
        keys: list[int] = []
        seen: set[int] = set()
        repeated = "with the prompt of an earlier row"
        if reader.demonstrates:
            repeated = "equal to an earlier row"
        for index, row in enumerate(self.table):
            try:
                example = reader.example(row)
            except RowError as error:
                self.left_out[str(error)].append(index)
                continue
            prompt = example.text, example.messages, example.tools
            key = _key(*prompt, example.demonstration, *map(row.get, self._identity))
            if reader.demonstrates and not example.demonstration:
                self.left_out["without a completion"].append(index)
            elif reader.answer_column and not example.expected_answer:
                self.left_out["without an answer"].append(index)
            elif key in seen:
                self.left_out[repeated].append(index)
            else:
                seen.add(key)
                indices.append(index)
                keys.append(_key(*prompt))
        return np.array(indices, dtype=np.int64), np.array(keys, dtype=np.uint64)


def _key(*parts: Any) -> int:
    """Returns a 64-bit hash of texts and messages."""
    content = json.dumps(parts, default=str)  # Parquet has dates
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")
