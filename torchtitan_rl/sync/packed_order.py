"""The order in which a CPU engine's packed copy has the elements of a matrix, asked of vLLM's own packing with numbered elements."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchtitan_rl.checksum import INTEGERS

DIGIT = 2**15
"""Elements are numbered in digits that fit into the 16 bits of a bfloat16."""


@cache
def packed_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Returns the place in an expert's matrix of each element of its packed copy, [rows * columns] int64.

    Raises RuntimeError as `order_of`.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    return order_of(lambda matrix: cpu_prepack_moe_weight(matrix[None], isa), rows, columns, dtype)


@cache
def convolution_order(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the same of a depthwise convolution's weight, [rows * columns] int64."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    return order_of(causal_conv1d_weight_pack, rows, columns, dtype)


def order_of(
    pack: Callable[[Tensor], Tensor], rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Returns the place in a matrix of each element of its packed copy, [rows * columns] int64.

    Raises RuntimeError if `pack` does more than move elements.
    """
    places = torch.arange(rows * columns)  # [rows * columns]
    order = torch.zeros_like(places)
    integers = INTEGERS[dtype.itemsize]
    for digit, factor in ((places % DIGIT, 1), (places // DIGIT, DIGIT)):
        packed = pack(digit.to(integers).view(dtype).view(rows, columns))
        order += (
            factor * packed.flatten().view(integers).long()
        )  # a digit times its factor does not fit into 16 bits
    if not torch.equal(order.sort().values, places):
        raise RuntimeError(
            "vLLM packs weights otherwise than by moving elements: they cannot be proven."
        )
    return order
