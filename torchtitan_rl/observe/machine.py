"""This machine: the memory in use, and a GPU's peak speed."""

import os
from functools import cache
from pathlib import Path

import torch

from torchtitan_rl.device import ON_CPU


def used_memory_bytes() -> int:
    """Bytes in use now: on this rank's GPU by anyone, or this process's resident set without one.

    At the end of a phase it is the phase's peak: PyTorch's allocator keeps what a phase took until the engine wakes. PyTorch's
    own peak counts the engine's memory also while it sleeps and that memory is given back.
    """
    if ON_CPU:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info()
    return total - free


@cache
def peak_flops_per_s() -> float | None:
    """This GPU's dense bfloat16 peak by torchtitan's table; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name())
