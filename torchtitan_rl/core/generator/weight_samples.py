"""Which elements of a weight are looked at when a copy of it is proven.

Of one row in 8, and in up to 64 where a matrix has many, one block of neighbouring columns, in each of these rows another one: so each
tensor-parallel share of up to 8 has some, and a row costs one cache line. Rows and blocks move on at each look, until every element was seen.
Vectors are looked at whole.

Example: of a [32, 64] matrix at look 1 these are columns 0 to 7 of row 1, 40 to 47 of row 9, 16 to 23 of row 17, 56 to 63 of row 25.
"""

import functools
import math

import torch
from torch import Tensor

BLOCK = 8
"""Columns. Shares of a width that is a multiple of 64 are whole blocks; of another width single elements are looked at."""

ROWS = 16
"""Of a large matrix, at each look; more than these where they would be less than one in 64, and one in 8 of a small one."""

COLUMNS = 8
"""Whole columns, where only those can be had, spread evenly."""


class Part:
    """What one owner holds of a matrix: some rows of a range of columns. Made by `part_of`, which makes equal ones once."""

    def __init__(self, rows: Tensor, height: int, width: int, columns: slice, local_rows: Tensor) -> None:
        self.height, self.width = height, width
        self.block = BLOCK if width % (8 * BLOCK) == 0 else 1
        assert columns.start % self.block == columns.stop % self.block == 0, (
            "a tensor-parallel share that is no multiple of 8"
        )
        in_order = (torch.equal(t.cpu(), torch.arange(height)) for t in (rows, local_rows))
        whole, owned = (one and columns == slice(0, width) for one in in_order)
        self.is_whole = whole
        """Whether it is all of the matrix, in order."""
        self.vector = height if whole and owned and width == 1 else 0
        """The length of an owner's that is all of it; 0 of a matrix."""
        self._blocks = width // self.block  # in blocks, as all that follows
        self._begin, self._end = columns.start // self.block, columns.stop // self.block
        self._one_in = rows_one_in(height) if width > 1 else 1
        order = (rows % self._one_in).argsort(stable=True)  # those together that are looked at together
        self._rows = rows[order] // self._one_in  # [n]
        self._group = rows[order] % self._one_in  # [n]
        self._first = self._rows * _step(self._blocks) % self._blocks  # [n] the block that a row's first look is at
        start = local_rows[order] * (self._end - self._begin) - self._begin  # [n] where the owner has a row's block 0
        self._elements = start[:, None] * self.block + torch.arange(
            self.block, device=rows.device
        )  # [n, block] of block 0
        self._sizes = self._sizes_of(self._group)
        self._step, self._looks = -1, []
        self._turn, self._look = -1, None

    def sample(self, owned: Tensor, turn: int) -> tuple[Tensor | None, Tensor]:
        """(which of the rows that the whole matrix is looked at in have a block here, None for all; those blocks, [rows * block];
        of a vector a view).

        Args:
            owned: what the owner has, [rows of its own, columns of this part] or a vector.
        """
        if self.vector and owned.numel() == self.vector:
            return None, owned
        rows, elements = self.look(turn)
        return rows, owned.take(elements)

    def look(self, turn: int) -> tuple[Tensor | None, Tensor]:
        """As `sample`, which of the owner's elements these are."""
        if turn != self._turn:
            step, group = divmod(turn, self._one_in)
            step %= self._blocks
            if step != self._step:
                self._step, self._looks = step, self._looks_of(step)
            self._turn, self._look = turn, self._looks[group]
        return self._look

    def _looks_of(self, step: int) -> list[tuple[Tensor | None, Tensor]]:
        """The looks that together see every row once.

        Args:
            step: by how many blocks they are further than the first.
        """
        at = (self._first + step) % self._blocks  # [n]
        rows, elements, sizes = self._rows, self._elements + (at * self.block)[:, None], self._sizes
        if self._end - self._begin < self._blocks:
            here = (at >= self._begin) & (at < self._end)
            rows, elements, sizes = rows[here], elements[here], self._sizes_of(self._group[here])
        of_each = [None] * self._one_in if self.is_whole else rows.split(sizes)
        return list(zip(of_each, elements.view(-1).split([n * self.block for n in sizes]), strict=True))

    def _sizes_of(self, groups: Tensor) -> list[int]:
        """How many rows of each group there are."""
        return groups.bincount(minlength=self._one_in).tolist()


_parts: dict[tuple, Part] = {}


def part_of(rows: Tensor, height: int, width: int, columns: slice, local_rows: Tensor) -> Part:
    """The part of a [height, width] matrix that has these `columns` of these `rows`, which its owner has at `local_rows`."""
    numbers = (t.cpu().numpy().tobytes() for t in (rows, local_rows))
    key = (*numbers, height, width, columns.start, columns.stop, rows.device)
    if key not in _parts:
        _parts[key] = Part(rows, height, width, columns, local_rows)
    return _parts[key]


def sample_together(parts: tuple[Part, ...], owned: Tensor, turn: int) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Of several matrices that lie in one: (for each part the rows, as `Part.sample`; all values, one part's after another's)."""
    if len(parts) == 1:
        rows, values = parts[0].sample(owned, turn)
        return (rows,), values
    rows, elements = _look_together(parts, turn)
    return rows, owned.take(elements)


@functools.lru_cache(8)
def _look_together(parts: tuple[Part, ...], turn: int) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Once for the layers of a model, which are alike."""
    rows, elements = zip(*(part.look(turn) for part in parts), strict=True)
    return rows, torch.cat(elements)


def rows_one_in(height: int) -> int:
    """Of how many rows of a matrix one is looked at: after so many looks all were."""
    return min(max(height // ROWS, 8), 64, height)


def _step(width: int) -> int:
    """By how many of `width` blocks one row's is further than that of the row before: few rows, too, come to all regions."""
    near = round(0.618 * width)  # the golden section
    return next(step for step in range(near, near + width + 1) if math.gcd(step, width) == 1)


def sampled_columns(width: int, turn: int) -> slice:
    """The columns of a matrix that are sampled whole. Example: of 32 columns at turn 1 these are 1, 5, 9, ... 29."""
    stride = max(1, width // COLUMNS)
    return slice(turn % stride, width, stride)
