"""What this machine does at most, measured once at the start in well under two seconds: what a step's speed is held against."""

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU

SIDE, COPY_BYTES = (1024, 2**27) if ON_CPU else (8192, 2**30)
"""Rows and columns of the product: large enough for the peak, small enough for three of them in a tenth of a second."""


class Speeds(NamedTuple):
    """Of one rank while the others do the same, so that ranks which share cores share their peak."""

    float32_flops_per_s: float
    bfloat16_flops_per_s: float
    memory_bytes_per_s: float
    """Read and written, while copying."""

    def flops_per_s(self, dtype: str) -> float:
        """The matrix peak of "float32" or "bfloat16"."""
        return self.float32_flops_per_s if dtype == "float32" else self.bfloat16_flops_per_s


@cache
def measured_speeds() -> Speeds:
    """The best of three of each; measured at the first call."""
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
