"""Chooses the dtypes that are "auto" by what this machine multiplies faster.

It asks for instructions and measures nothing: a busy machine must not change the dtype of a run that is resumed.
"""

import os
from typing import TYPE_CHECKING

import torch

from torchtitan_rl.device import ON_CPU

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")
"""With any of them a CPU multiplies bfloat16 faster than float32: 2.3 times on an AMD EPYC with avx512_bf16."""

ISAS_WITHOUT = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from using them."""


def choose_dtypes(config: "RunConfig") -> str:
    """Set generator.dtype and trainer.mixed_precision_param if they are "auto". Returns a line for the user, or ""."""
    if "auto" not in config.dtypes.values():
        return ""
    has_instructions = not ON_CPU or multiplies_bfloat16()
    chosen = "bfloat16" if has_instructions else "float32"
    if config.generator.dtype == "auto":
        config.generator.dtype = chosen
    if config.trainer.mixed_precision_param == "auto":
        config.trainer.mixed_precision_param = chosen
    return f"dtype auto: {chosen}" + (
        "" if has_instructions else ", as this CPU has no instructions for bfloat16"
    )


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16, and oneDNN may use them."""
    capabilities = torch.cpu.get_capabilities()
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in ISAS_WITHOUT
    return allowed and any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS)
