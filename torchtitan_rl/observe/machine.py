"""Peak speeds of this machine, the reference for a step's efficiency. Measured at the start, in under 2 s."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from torchtitan_rl.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.events import Kind, Listener

LARGEST_SIDE, COPY_BYTES = (1024, 2**27) if ON_CPU else (8192, 2**30)
"""Rows and columns of the largest product: enough to reach the peak, few enough for three products in 0.1 s."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Peak speeds of one rank, measured while all ranks measure, so that ranks sharing cores share the peak."""

    flops_per_s: dict[str, float]
    """Matrix-product FLOP/s by dtype: {"float32": 1.9e11}. It has the run's dtypes alone."""
    memory_bytes_per_s: float
    """Bytes read plus bytes written, while copying."""


@cache
def measured_speeds(*dtypes: str) -> Speeds:
    """The best of three measurements of each speed, for products in these dtypes ("float32", "bfloat16"). Under 2 s.

    Measured at the first call, then cached.
    """
    source, target = (
        torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE_TYPE) for _ in range(2)
    )
    return Speeds(
        flops_per_s={
            dtype: product_flops_per_s(getattr(torch, dtype)) for dtype in sorted(set(dtypes))
        },
        memory_bytes_per_s=2 * COPY_BYTES / _least_seconds(lambda: target.copy_(source)),
    )


def product_flops_per_s(dtype: torch.dtype) -> float:
    """FLOP/s of square products, the largest that take at most 0.25 s: bfloat16 is slow on CPUs without its instructions."""
    side = 256
    while True:
        a = torch.ones(side, side, dtype=dtype, device=DEVICE_TYPE)  # [side, side]
        seconds = _least_seconds(lambda a=a: a @ a)
        if side == LARGEST_SIDE or 8 * seconds > 0.25:
            return 2 * side**3 / seconds
        side *= 2


def _least_seconds(function: Callable[[], object]) -> float:
    """The shortest of three calls, after one that is not counted."""
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


highest_sample = 0  # bytes


def sample_memory() -> int:
    """Bytes in use now: on this rank's GPU by anyone, or this process's resident set without one.

    Call it at the end of a phase: PyTorch's allocator keeps what a phase took until the engine wakes, so that this is the
    phase's peak. PyTorch's own peak counts the engine's memory also while it sleeps and that memory is given back.
    """
    global highest_sample
    if ON_CPU:
        used = _resident_bytes()
    else:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    highest_sample = max(highest_sample, used)
    return used


def peak_memory_bytes() -> int:
    """The highest sample since this was last called, that of now included."""
    global highest_sample
    sample_memory()
    highest, highest_sample = highest_sample, 0
    return highest


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemorySampler(Listener):
    """Samples the memory in use at the end of every timed part, where it is the part's peak on a GPU."""

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        try:
            yield
        finally:
            if kind == "timed":
                sample_memory()


@cache
def peak_flops_per_s() -> float | None:
    """This GPU's dense bfloat16 peak by torchtitan's table; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name())
