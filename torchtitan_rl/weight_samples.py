"""Which elements of a weight are looked at when a copy of it is proven.

Of every row one block of neighbouring columns, the next one in the next row: so each row, each column and each
tensor-parallel share has some, and a row costs one cache line. The blocks move on at each look; after (width / BLOCK) looks every
element was seen.

Example: of a [4, 512] matrix at turn 2 these are columns 16 to 23 of row 0, 24 to 31 of row 1, 32 to 39 of row 2, ...
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 8
"""Columns. Shares of a width that is a multiple of 64 are whole blocks; of another width single elements are looked at."""

COLUMNS = 8
"""Whole columns, where only those can be had, spread evenly, so that every tensor-parallel share has some."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one owner holds of a matrix: some rows of a range of columns. Made by `part_of`: equal ones are the same."""

    rows: Tensor
    """[n] which rows of the matrix they are."""
    is_whole: bool
    """Whether it is all of the matrix, in order."""
    width: int
    """Of the whole matrix, in blocks."""
    begin: int
    """The first block of this part."""
    end: int
    block: int
    local_rows: Tensor
    """[n] where they are in what the owner has."""

    def sample(self, owned: Tensor, turn: int) -> tuple[Tensor | None, Tensor]:
        """(the rows of the matrix that have a sampled block here, None for all; those blocks, [rows, block]).

        Args:
            owned: what the owner has, [rows of its own, columns of this part].
        """
        rows, blocks = _places(self, turn)
        return rows, owned.reshape(-1, self.block).index_select(0, blocks)


_parts: dict[tuple, Part] = {}


def part_of(rows: Tensor, height: int, width: int, columns: slice, local_rows: Tensor) -> Part:
    """The part of a [height, width] matrix that has these `columns` of these `rows`, which its owner has at `local_rows`."""
    block = BLOCK if width % (8 * BLOCK) == 0 else 1
    assert columns.start % block == columns.stop % block == 0, "a tensor-parallel share that is no multiple of 8"
    numbers = (t.cpu().numpy().tobytes() for t in (rows, local_rows))
    key = (*numbers, height, width, columns.start, columns.stop, rows.device)
    if key not in _parts:
        whole = columns == slice(0, width) and torch.equal(rows.cpu(), torch.arange(height))
        _parts[key] = Part(
            rows, whole, width // block, columns.start // block, columns.stop // block, block, local_rows
        )
    return _parts[key]


@functools.lru_cache(64)
def _places(part: Part, turn: int) -> tuple[Tensor | None, Tensor]:
    """(rows of the matrix or None, which of the owner's blocks, counted through all its rows)."""
    at = (part.rows + turn) % part.width  # [n]
    places = part.local_rows * (part.end - part.begin) + (at - part.begin)
    if part.begin == 0 and part.end == part.width:
        return (None if part.is_whole else part.rows), places
    here = ((at >= part.begin) & (at < part.end)).nonzero()[:, 0]
    return part.rows[here], places[here]


@functools.lru_cache(4096)
def sampled_columns(width: int, turn: int, begin: int = 0, end: int | None = None) -> tuple[slice, slice]:
    """The sampled columns within [begin, end) of a matrix: where they are, counted from `begin`, and which of all they are.

    Example: of 32 columns at turn 1 these are 1, 5, 9, ... 29; within the second half (slice(1, 16, 4), slice(4, 8)).
    """
    end = width if end is None else end
    stride = max(1, width // COLUMNS)
    first = turn % stride
    before = max(0, -(-(begin - first) // stride))
    start = first + before * stride - begin
    inside = range(start, end - begin, stride)
    return slice(start, end - begin, stride), slice(before, before + len(inside))
