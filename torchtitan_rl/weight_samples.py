"""Which elements of a weight are looked at when a copy of it is proven.

Of one row in eight one block of neighbouring columns, in each of these rows another one: so each tensor-parallel share has some,
and a row costs one cache line. Rows and blocks move on at each look; after (width) looks every element was seen. Vectors are looked at
whole.

Example: of a [32, 64] matrix at look 1 these are columns 0 to 7 of row 1, 40 to 47 of row 9, 16 to 23 of row 17, 56 to 63 of row 25.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 8
"""Columns. Shares of a width that is a multiple of 64 are whole blocks; of another width single elements are looked at."""

ROWS_ONE_IN = 8
"""Of a matrix, at each look."""

COLUMNS = 8
"""Whole columns, where only those can be had, spread evenly, so that every tensor-parallel share has some."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one owner holds of a matrix: some rows of a range of columns. Made by `part_of`: equal ones are the same."""

    is_whole: bool
    """Whether it is all of the matrix, in order."""
    vector: int
    """The length of an owner's vector that is all of it; 0 of a matrix."""
    width: int
    """Of the whole matrix, in blocks."""
    begin: int
    """The first block of this part."""
    end: int
    block: int
    rows: tuple[tuple[Tensor, Tensor], ...]
    """For each class of rows that is looked at together: (their numbers in this class, [n]; where the owner has them, [n])."""

    def sample(self, owned: Tensor, turn: int) -> tuple[Tensor | None, Tensor]:
        """(which of the rows that the whole matrix is looked at in have a block here, None for all; those blocks, [rows, block]).

        Args:
            owned: what the owner has, [rows of its own, columns of this part].
        """
        if self.vector and owned.numel() == self.vector:
            return None, owned.reshape(-1, 1).clone()
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
        whole, owned = (torch.equal(t.cpu(), torch.arange(height)) for t in (rows, local_rows))
        whole = whole and columns == slice(0, width)
        classes = ROWS_ONE_IN if width > 1 else 1
        of_class = tuple(
            (rows[mine] // classes, local_rows[mine]) for mine in (rows % classes == i for i in range(classes))
        )
        vector = height if whole and owned and width == 1 else 0
        _parts[key] = Part(
            whole, vector, width // block, columns.start // block, columns.stop // block, block, of_class
        )
    return _parts[key]


def _step(width: int) -> int:
    """By how many of `width` blocks one row's is further than that of the row before: few rows, too, come to all regions."""
    near = round(0.618 * width)  # the golden section
    return next(step for step in range(near, near + width + 1) if math.gcd(step, width) == 1)


@functools.lru_cache(64)
def _places(part: Part, turn: int) -> tuple[Tensor | None, Tensor]:
    """(as `Part.sample`, which of the owner's blocks these are, counted through all its rows)."""
    look, which = divmod(turn, len(part.rows))
    rows, local_rows = part.rows[which]
    at = (rows * _step(part.width) + look) % part.width  # [n]
    places = local_rows * (part.end - part.begin) + (at - part.begin)
    if part.begin == 0 and part.end == part.width:
        return (None if part.is_whole else rows), places
    here = ((at >= part.begin) & (at < part.end)).nonzero()[:, 0]
    return rows[here], places[here]


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
