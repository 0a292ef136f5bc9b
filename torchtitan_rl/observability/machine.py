"""Peak speeds of this machine, the reference for a step's efficiency. Measured once at the start, in under 2 s."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.core.events import Kind, Listener

SIDE, COPY_BYTES = (1024, 2**27) if ON_CPU else (8192, 2**30)
"""Rows and columns of the product: large enough to reach the peak, small enough for three products in 0.1 s."""


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


_highest_sample = 0  # bytes


def sample_memory() -> int:
    """Bytes in use now: on this rank's GPU by anyone, or this process's resident set without one.

    Call it at the end of a phase: PyTorch's allocator keeps what a phase took until the engine wakes, so that this is the
    phase's peak. PyTorch's own peak counts the engine's memory also while it sleeps and that memory is given back.
    """
    global _highest_sample
    if ON_CPU:
        used = _resident_bytes()
    else:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    _highest_sample = max(_highest_sample, used)
    return used


def peak_memory_bytes() -> int:
    """The highest sample since this was last called, that of now included."""
    global _highest_sample
    sample_memory()
    highest, _highest_sample = _highest_sample, 0
    return highest


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS, which tells the highest alone, in bytes
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MemorySampler(Listener):
    """Samples the memory in use at the end of every timed part, where it is the part's peak on a GPU."""

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        """See Listener."""
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
