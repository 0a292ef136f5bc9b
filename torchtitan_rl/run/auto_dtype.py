"""Chooses the dtypes that are "auto" by what this machine multiplies faster.

It asks for instructions and measures nothing: a busy machine must not change the dtype of a run that is resumed.
"""

import os
from typing import TYPE_CHECKING

import torch

from torchtitan_rl.device import FOR_CPU

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")
"""With any of them a CPU multiplies bfloat16 faster than float32: 2.3 times on an AMD EPYC with avx512_bf16."""

ISAS_WITHOUT = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from using them."""


def set_dtypes(config: "RunConfig") -> str:
    """Set the dtypes of generator and trainer that are "auto".

    Returns: a line that says to what, or that a bfloat16 is slow on this CPU; "" if neither.
    """
    dtype, why = "bfloat16", ""
    if FOR_CPU and not _multiplies_bfloat16():
        dtype, why = "float32", ", as this CPU has no instructions for bfloat16"
    line, slow = "", []
    fields = {"generator.dtype": config.generator, "trainer.mixed_precision_param": config.trainer}
    for name, part in fields.items():
        field = name.partition(".")[2]
        if getattr(part, field) == "auto":
            setattr(part, field, dtype)
            line = f"dtype auto: {dtype}{why}"
        elif getattr(part, field) == "bfloat16" and why:
            slow.append(name)
    if slow:
        line = (
            f"warning: {' and '.join(slow)} bfloat16 on a CPU without instructions for it: a layer of SmolLM2 takes 6 times as long as in "
            "float32, and 18 times with its backward. auto chooses float32 here"
        )
    return line


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16, and oneDNN may use them."""
    capabilities = torch.cpu.get_capabilities()
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in ISAS_WITHOUT
    return allowed and any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS)
