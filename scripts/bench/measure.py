"""What the benchmarks share: alternated timings, a process's peak memory, the machine.

Every ratio comes from two things timed in turn in one process, so that a machine's other work falls on both. "cpu" is user and
system time of this process, which waiting for a core does not lengthen; on a GPU "wall" is the one to read.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torchtitan_rl.device import DEVICE_TYPE, ON_CPU

# isort: split
import torch


class Seconds(NamedTuple):
    wall: float
    cpu: float


def seconds_of(function: Callable[[], object]) -> Seconds:
    """One call's."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    if not ON_CPU:
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(functions: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, Seconds]:
    """Each function's median, after one call that is not counted; they are called in turn."""
    for function in functions.values():
        function()
    found: dict[str, list[Seconds]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            found[name].append(seconds_of(function))
    return {name: Seconds(*map(median, zip(*times, strict=True))) for name, times in found.items()}


def extra_peak_bytes(function: Callable[[], object]) -> int:
    """The rise of memory over its use before the call."""
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # gives back the memory that was freed
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def machine_line() -> str:
    """What to print with a result: the device, the threads, the load of the machine."""
    device = torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{device}, load {load:.1f} on {os.cpu_count()} cores, torch {torch.__version__}"
