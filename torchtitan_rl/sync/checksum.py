"""Checksums of all bits of a matrix. The checksums of its parts add up, in any order, to the checksum of the whole."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan_rl.device import ON_CPU

GPU_BLOCK = 2**24
BLOCK = 2**17 if ON_CPU else GPU_BLOCK
"""Elements per block. Their products take 8 bytes each: 1 MB on a CPU, 128 MB on a GPU."""

INTEGERS = {2: torch.int16, 4: torch.int32}


class Matrices(NamedTuple):
    """Matrices of one shape with the same weights, such as a projection of every layer: one launch sums many of them.

    Each has k checksums. A checksum is the sum over all elements of (bits as an integer) x (weight of the row) x (weight of the
    column), modulo 2^64. On a CPU, -0.0 and denormal numbers count as 0: an engine's packed matrix is read back by a product,
    which does not preserve them.
    """

    weights: Tensor
    """[k, rows] int64, `place_weights` of each row's index in the whole matrix. A weight of 0 leaves a row out. [1, rows] where
    k matrices are read at once."""
    first_column: int
    """Index of the first column in the whole matrix."""
    scale: float
    """Each element is multiplied by it."""
    reads: list[Callable[[], Tensor]]
    """Each returns a matrix [rows, columns], or a vector [rows]; may be a part of a larger one. Or k matrices [..., rows, columns]."""
    numbers: list[int]
    """[matrices * k] where `sums_of` adds the checksums."""

    def checksums(self, dtype: torch.dtype) -> Tensor:
        """Returns the checksums of the values in `dtype`, [matrices * k] int64. Does not synchronize with their device."""
        matrices = [as_rows(read().detach()) for read in self.reads]  # [rows, columns] each
        (rows, width), height, begin = matrices[0].shape, self.weights.shape[1], 0
        columns = _column_weights(self.first_column, width, self.weights.device)  # [columns]
        sums = self.weights.new_empty(len(matrices) * rows)
        for block in _blocks(matrices, dtype):
            if self.scale != 1.0:
                block = block * self.scale
            if block.device.type == "cpu":
                block = F.hardshrink(block, torch.finfo(dtype).tiny)
            end = begin + len(block)
            torch.sum(block.view(INTEGERS[block.itemsize]) * columns, 1, out=sums[begin:end])
            begin = end
        of_rows = sums.view(len(matrices), rows // height if height else 1, height)
        return (self.weights * of_rows).sum(-1).flatten()


def sums_of(groups: Iterable[Matrices], sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `sums`, [names] int64, with all checksums added at their numbers."""
    groups = list(groups)
    if groups:
        numbers = torch.tensor([n for group in groups for n in group.numbers], device=sums.device)
        sums.index_add_(0, numbers, torch.cat([group.checksums(dtype) for group in groups]))
    return sums


def as_rows(matrix: Tensor) -> Tensor:
    """Returns all rows [rows, columns] of a vector [rows], which has one column, or of matrices [..., columns]."""
    return matrix[:, None] if matrix.ndim == 1 else matrix.flatten(0, -2)


def _blocks(matrices: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields all rows of matrices [rows, columns] in order, cast, in blocks of at most BLOCK elements: a part of a matrix, or
    as many matrices as fit, which are copied by one launch."""
    rows, width = matrices[0].shape
    height = max(1, BLOCK // max(1, width))
    number = max(1, height // max(1, rows))
    for first in range(0, len(matrices), number):
        several = matrices[first : first + number]
        if len(several) > 1:
            block = several[0].new_empty(len(several), rows, width, dtype=dtype)
            torch._foreach_copy_(block.unbind(), several)
            yield block.flatten(0, 1)
            continue
        for top in range(0, rows, height):
            yield several[0][top : top + height].to(dtype)


@cache
def _column_weights(first: int, width: int, device: torch.device) -> Tensor:
    """Returns the weights of columns [first, first + width), [width] int64. A model has few widths; the ten kernels for
    each would be most of a push's."""
    return place_weights(-1 - torch.arange(first, first + width, device=device))


def place_weights(places: Tensor) -> Tensor:
    """Returns an odd pseudo-random number for each index, [n] int64 -> [n] int64. Columns have negative indices."""
    mixed = (places + 1) * -7046029254386353131  # 2^64 / golden ratio, as a signed integer
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1
