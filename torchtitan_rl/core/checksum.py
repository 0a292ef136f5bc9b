"""A checksum of every bit of a matrix that adds up over its parts, whoever holds them and in whatever order."""

import functools

import torch
from torch import Tensor

from torchtitan_rl.core.device import ON_CPU

COLUMNS = 512
"""Columns per block. 2^31 (bits) x 2^13 (weights) x 2^9 (columns) = 2^53, so a row's sum is exact in float64."""

ROWS = 2**9 if ON_CPU else 2**15
"""Rows per block, which bounds the float64 copy: 2 MB on a CPU, 128 MB on a GPU."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Share = tuple[slice, slice]
"""(rows, columns) of a part of a whole tensor."""


def checksums(matrix: Tensor, weights: Tensor, first_column: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """One checksum for each row of `weights`, [k] int64, on the matrix's device and without waiting for it.

    A checksum is the sum over all elements of (bits as an integer) x (weight of the row) x (weight of the column), modulo
    2^64. Nothing is rounded, so the checksums of disjoint parts add up to that of the whole.

    Args:
        matrix: [rows, columns] or a vector [rows], a part of a larger one; it may be strided.
        weights: [k, rows] int64, `row_weights` of each row's place in the whole, or 0 to leave the row out.
        first_column: the place of the first column in the whole.
        dtype: cast to this first, block by block.
    """
    matrix = matrix.unsqueeze(1) if matrix.ndim == 1 else matrix  # [rows, columns]
    width, begin = matrix.shape[1], 0
    total = weights.new_zeros(len(weights))  # [k]
    while begin < width:
        block, within = divmod(first_column + begin, COLUMNS)
        end = min(begin + COLUMNS - within, width)
        columns, factor = _column_weights(block, within, end - begin, matrix.device)
        for row in range(0, len(matrix), ROWS):
            part = matrix[row : row + ROWS, begin:end].to(dtype or matrix.dtype)  # [<= ROWS, <= COLUMNS]
            sums = (part.view(INTEGERS[part.element_size()]).double() @ columns).long()  # [<= ROWS]
            total += (weights[:, row : row + ROWS] * sums).sum(1) * factor  # [k]
        begin = end
    return total


def row_weights(rows: Tensor) -> Tensor:
    """Odd pseudo-random numbers for these places in the whole, [n] int64 for [n] int64."""
    mixed = (rows + 1) * -7046029254386353131  # 2^64 / golden ratio, as a signed integer
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1


@functools.lru_cache(256)
def _column_weights(block: int, within: int, size: int, device: torch.device) -> tuple[Tensor, int]:
    """(odd weights below 2^13 of the columns, distinct within a block, [size] float64; the odd factor of their block)."""
    order = torch.randperm(2**12, generator=torch.Generator().manual_seed(block))[within : within + size]
    factor = int(row_weights(torch.tensor(-2 - block)))
    return (2 * order + 1).to(device, torch.float64), factor
