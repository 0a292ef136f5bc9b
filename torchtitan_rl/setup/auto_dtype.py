"""Chooses the dtypes that are "auto" by what this machine multiplies faster."""

import time
from typing import TYPE_CHECKING

import torch

from torchtitan_rl.core.device import ON_CPU

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

GAIN = 1.2
"""bfloat16 is chosen on a CPU from this speed-up on. Below it, its rounding is not worth it."""


def choose_dtypes(config: "RunConfig") -> str:
    """Set generator.dtype and trainer.mixed_precision_param if they are "auto". Returns a line for the user, or ""."""
    chosen, why = "bfloat16", "a GPU's"
    if "auto" not in config.dtypes.values():
        return ""
    if ON_CPU:
        gain = seconds_of_products(torch.float32) / seconds_of_products(torch.bfloat16)
        chosen = "bfloat16" if gain >= GAIN else "float32"
        why = f"this CPU multiplies bfloat16 {gain:.1f} x as fast as float32"
    if config.generator.dtype == "auto":
        config.generator.dtype = chosen
    if config.trainer.mixed_precision_param == "auto":
        config.trainer.mixed_precision_param = chosen
    return f"dtype auto: {chosen} ({why})"


def seconds_of_products(dtype: torch.dtype) -> float:
    """Returns the shortest time of a product that a small model's layer has, of 20."""
    inputs = torch.ones(512, 1024, dtype=dtype)  # [T, D]
    weight = torch.ones(1024, 1024, dtype=dtype)  # [F, D]
    times: list[float] = []
    for _ in range(20):
        begin = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)  # [T, F]
        times.append(time.perf_counter() - begin)
    return min(times)
