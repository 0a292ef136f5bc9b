"""Checksums of all bits of a matrix. The checksums of its parts add up, in any order, to the checksum of the whole."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan_rl.device import ON_CPU

GPU_BLOCK = 2**24
BLOCK = 2**17 if ON_CPU else GPU_BLOCK
"""Elements per block. Their products take 8 bytes each: 1 MB on a CPU, 128 MB on a GPU."""

INTEGERS = {2: torch.int16, 4: torch.int32}


def checksums(
    matrix: Tensor, weights: Tensor, *, first_column: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns k checksums, [k] int64 on the matrix's device. Does not synchronize with it.

    A checksum is the sum over all elements of (bits as an integer) x (weight of the row) x (weight of the column), modulo
    2^64. On a CPU, -0.0 and denormal numbers count as 0: an engine's packed matrix is read back by a product, which does
    not preserve them.

    Args:
        matrix: [rows, columns], or a vector [rows]; may be a part of a larger matrix. Or k matrices, [..., rows, columns].
        weights: [k, rows] int64, `place_weights` of each row's index in the whole matrix. A weight of 0 leaves a row out.
            [1, rows] for k matrices.
        first_column: index of the first column in the whole matrix.
        dtype: each block is cast to it first; None: no cast.
    """
    # [k * rows, columns]; a vector has one column
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix.flatten(0, -2)
    width = matrix.shape[1]
    columns = _column_weights(first_column, width, matrix.device)  # [columns]
    sums, height = weights.new_zeros(len(matrix)), max(1, BLOCK // max(1, width))  # [k * rows]
    for begin in range(0, len(matrix), height):
        block = matrix[begin : begin + height].to(dtype or matrix.dtype)  # [<= height, columns]
        if matrix.device.type == "cpu":
            block = F.hardshrink(block, torch.finfo(block.dtype).tiny)
        sums[begin : begin + height] = (block.view(INTEGERS[block.element_size()]) * columns).sum(1)
    of_matrices = sums.view(-1, weights.shape[1]) if len(sums) else sums[None]  # [1 or k, rows]
    return (weights * of_matrices).sum(1)


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
