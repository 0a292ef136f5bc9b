"""Small random multimodal checkpoints, as transformers writes them."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from scripts.make_random_checkpoint import save
from tests.parts.hf_decoders import HF_FAMILIES
from tests.parts.tiny import ODD_DIMENSIONS

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 14}
_LAYERS = {"num_hidden_layers": 1, "image_size": 28}

MULTIMODAL = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", {"mm_tokens_per_image": 4}, {**_VISION, **_LAYERS}),
    "Mistral3ForConditionalGeneration": ("mistral", {}, {**_VISION, **_LAYERS, "model_type": "pixtral", "head_dim": 16}),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3_5_text", {}, {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": ODD_DIMENSIONS["hidden_size"]},
    ),
}  # fmt: skip
"""By architecture: the family of its text, the entries beside its parts, and its vision's."""


def save_multimodal(
    folder: Path, architecture: str, *, older_names: bool = False, tokenizer: bool = False, **settings: Any
) -> None:
    """Write a random checkpoint.

    Args:
        older_names: `language_model.model.layers` and `vision_tower`, as transformers still writes for Gemma 3 and Mistral 3.
        tokenizer: write one too, as a run needs it.
        settings: entries of the text's config.
    """
    torch.manual_seed(0)
    family, entries, vision = MULTIMODAL[architecture]
    text = {
        **ODD_DIMENSIONS,
        "initializer_range": 0.15,
        "pad_token_id": None,
        **deepcopy(HF_FAMILIES[family]),
        "model_type": family,
        **settings,
    }
    whole = getattr(transformers, architecture)
    config = whole.config_class(
        text_config=text, vision_config=vision, tie_word_embeddings=family != "mistral", **entries
    )
    config.initializer_range = text["initializer_range"]
    model = whole(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    save(model, folder) if tokenizer else model.save_pretrained(folder)
    if family == "mistral":  # as published: nothing says that the head is not tied
        entries = json.loads((folder / "config.json").read_text())
        del entries["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(entries))
    if older_names:
        file = folder / "model.safetensors"
        save_file({_older(name): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def _older(name: str) -> str:
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    begin, part, rest = name.partition("language_model.")
    return f"language_model.model.{rest}" if begin and part else name.removeprefix("model.")
