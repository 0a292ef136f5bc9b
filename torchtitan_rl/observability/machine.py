"""Peak speeds of this machine, the reference for a step's efficiency. Measured once at the start, in under 2 s."""

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU

SIDE = 1024 if ON_CPU else 8192
"""Rows and columns of the product: large enough to reach the peak, small enough for three products in 0.1 s."""
COPY_BYTES = 2**27 if ON_CPU else 2**30


class Speeds(NamedTuple):
    """Peak speeds of one rank, measured while all ranks measure, so that ranks sharing cores share the peak."""

    float32_flops_per_s: float
    bfloat16_flops_per_s: float
    memory_bytes_per_s: float
    """Bytes read plus bytes written, while copying."""

    def flops_per_s(self, dtype: str) -> float:
        """Peak matrix-product FLOP/s in "float32" or "bfloat16"."""
        return self.float32_flops_per_s if dtype == "float32" else self.bfloat16_flops_per_s


@cache
def measured_speeds() -> Speeds:
    """The best of three measurements of each speed; measured at the first call, then cached."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(SIDE, SIDE, dtype=dtype, device=DEVICE_TYPE)  # [SIDE, SIDE]
        rates.append(2 * SIDE**3 / _least_seconds(lambda a=a: a @ a))
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE_TYPE) for _ in range(2))
    return Speeds(*rates, 2 * COPY_BYTES / _least_seconds(lambda: target.copy_(source)))


def _least_seconds(function: Callable[[], object]) -> float:
    wait = torch.get_device_module(DEVICE_TYPE).synchronize
    function()
    seconds = []
    for _ in range(3):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
