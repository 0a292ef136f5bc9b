"""Which elements of a weight are looked at when a copy of it is proven.

Of one row in 8, and in up to 64 where a matrix has many, one block of neighbouring columns, in each of these rows another one: so each
tensor-parallel share has some, and a row costs one cache line. Rows and blocks move on at each look, until every element was seen.
Vectors are looked at whole.

Example: of a [32, 64] matrix at look 1 these are columns 0 to 7 of row 1, 40 to 47 of row 9, 16 to 23 of row 17, 56 to 63 of row 25.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 8
"""Columns. Shares of a width that is a multiple of 64 are whole blocks; of another width single elements are looked at."""

ROWS = 32
"""Of a large matrix, at each look; more than these where they would be less than one in 64, and one in 8 of a small one."""

COLUMNS = 8
"""Whole columns, where only those can be had, spread evenly."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one owner holds of a matrix: some rows of a range of columns. Made by `part_of`: equal ones are the same."""

    is_whole: bool
    """Whether it is all of the matrix, in order."""
    vector: int | None
    """The length of an owner's vector that is all of it; None of a matrix."""
    width: int
    """Of the whole matrix, in blocks."""
    begin: int
    """The first block of this part."""
    end: int
    block: int
    classes: tuple[tuple[Tensor, ...], ...]
    """For each class of rows that is looked at together, each [n]: (their numbers in this class; which of its blocks a row's
    first look is at; where the owner has the row's block 0, in blocks; the width; the number of classes)."""

    def sample(self, owned: Tensor, turn: int) -> tuple[Tensor | None, Tensor]:
        """(which of the rows that the whole matrix is looked at in have a block here, None for all; those blocks, [rows * block];
        of a vector a view).

        Args:
            owned: what the owner has, [rows of its own, columns of this part] or a vector.
        """
        if owned.numel() == self.vector:
            return None, owned.flatten()
        rows, places = _all_places(turn, len(_parts))[self]
        return rows, owned.reshape(-1, self.block).index_select(0, places).view(-1)


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
        blocks, begin, end = width // block, columns.start // block, columns.stop // block
        one_in = rows_one_in(height) if width > 1 else 1
        numbers, starts = rows // one_in, local_rows * (end - begin) - begin
        sizes = (torch.full_like(rows, size) for size in (blocks, one_in))
        of_rows = (numbers, numbers * _step(blocks) % blocks, starts, *sizes)
        classes = tuple(tuple(t[rows % one_in == i] for t in of_rows) for i in range(one_in))
        vector = height if whole and owned and width == 1 else None
        _parts[key] = Part(whole, vector, blocks, begin, end, block, classes)
    return _parts[key]


def rows_one_in(height: int) -> int:
    """Of how many rows of a matrix one is looked at: after so many looks all were."""
    return min(max(height // ROWS, 8), 64, height)


def _step(width: int) -> int:
    """By how many of `width` blocks one row's is further than that of the row before: few rows, too, come to all regions."""
    near = round(0.618 * width)  # the golden section
    return next(step for step in range(near, near + width + 1) if math.gcd(step, width) == 1)


@functools.lru_cache(2)
def _all_places(turn: int, num_parts: int) -> dict[Part, tuple[Tensor | None, Tensor]]:
    """For each of all parts (as `Part.sample`, which of the owner's blocks these are, counted through all its rows).

    For all at once: three operations take as long for a hundred rows as for all rows of a model.
    """
    of_class = [part.classes[turn % len(part.classes)] for part in _parts.values()]
    rows, first, starts, widths, one_in = (
        torch.cat(tensors) for tensors in zip(*of_class, strict=True)
    )  # each [all n]
    at = (first + turn // one_in) % widths
    sizes = [len(rows) for rows, *_ in of_class]
    each = zip(_parts.values(), rows.split(sizes), at.split(sizes), (starts + at).split(sizes), strict=True)
    return {part: _own(part, rows, at, places) for part, rows, at, places in each}


def _own(part: Part, rows: Tensor, at: Tensor, places: Tensor) -> tuple[Tensor | None, Tensor]:
    """Those that fall into the part's columns. All [n]."""
    if part.begin == 0 and part.end == part.width:
        return (None if part.is_whole else rows), places
    here = ((at >= part.begin) & (at < part.end)).nonzero()[:, 0]
    return rows[here], places[here]


def sampled_columns(width: int, turn: int) -> slice:
    """The columns of a matrix that are sampled whole. Example: of 32 columns at turn 1 these are 1, 5, 9, ... 29."""
    stride = max(1, width // COLUMNS)
    return slice(turn % stride, width, stride)
