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


def choose_dtypes(config: "RunConfig") -> dict[str, str]:
    """The dtype of generator and trainer by its field: this machine's where it is "auto"."""
    dtypes: dict[str, str] = {}
    for field, dtype in config.dtypes.items():
        dtypes[field] = machine_dtype() if dtype == "auto" else dtype
    return dtypes


def machine_dtype() -> str:
    """The dtype that this machine multiplies faster, "bfloat16" or "float32"."""
    return "bfloat16" if not ON_CPU or multiplies_bfloat16() else "float32"


def describe_choice(config: "RunConfig") -> str:
    """A line with the dtype of "auto", if the config has it, or ""."""
    if "auto" not in config.dtypes.values():
        return ""
    chosen = machine_dtype()
    why = ", as this CPU has no instructions for bfloat16" if chosen == "float32" else ""
    return f"dtype auto: {chosen}{why}"


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16, and oneDNN may use them."""
    capabilities = torch.cpu.get_capabilities()
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in ISAS_WITHOUT
    return allowed and any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS)
