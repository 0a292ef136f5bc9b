"""Adapter folders as peft and vLLM read them, and the base merged with an adapter."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.models.multimodal import PART, stored_tensors, text_name

PREFIX = "base_model.model."
"""peft's prefix of transformers' names."""

FILE = "adapter_model.safetensors"


def write_adapter(
    tensors: dict[str, Tensor],
    config: LoraConfig,
    base: str,
    output: Path,
    *,
    of_text: bool = False,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors.

    Args:
        tensors: by `Lora.weights`' names. B is not multiplied by the scale.
        base: the folder or hub name of the base.
        of_text: the base is a multimodal checkpoint, in whose model the text's layers have other names.
    """
    output.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    # Vision has layers of the same names, so the text's are named by a regular expression.
    of_part = rf".*\.{re.escape(PART)}.*\.({'|'.join(targets)})"
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": of_part if of_text else targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (output / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
    begin = PREFIX + (f"model.{PART}" if of_text else "model.")
    named = {begin + n.removeprefix("model."): t.contiguous() for n, t in tensors.items()}
    save_file(named, output / FILE, metadata={"format": "pt"})


def merged_weights(
    start: Path, tensors: dict[str, Tensor], scale: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields the start's weights by their text's names, with scale · B A added in float32 before the cast to `dtype`.

    bfloat16 has 8 bits of precision, so the cast may lose changes that the adapter holds.
    """
    left = {name.rpartition(".lora_")[0] for name in tensors}
    for stored, read in stored_tensors(start):
        weight, name = read(), text_name(stored)
        layer = name.removesuffix(".weight")
        if layer in left:
            left.remove(layer)
            a, b = (tensors[f"{layer}.lora_{one}.weight"].float() for one in "AB")
            weight = weight.float() + scale * b @ a
        yield name, weight.to(dtype)
    if left:
        raise KeyError(f"{start} has no weight of {min(left)}, which the adapter changes")
