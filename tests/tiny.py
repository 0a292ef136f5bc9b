"""A tiny random Qwen3 for tests, with the debug configs' tokenizer when one is asked for."""

from pathlib import Path

import torch

from torchtitan_rl.models import new_hf_model, small_qwen3

DIMENSIONS = {
    "vocab_size": 128,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "hidden_dim": 96,
}


def tiny_spec():
    """The model spec of `save_tiny_checkpoint`'s folder."""
    return small_qwen3(**DIMENSIONS)


def save_tiny_checkpoint(folder: Path, *, seed: int = 0, tie: bool = True) -> None:
    """A Hugging Face folder (config.json, model.safetensors) with random weights large enough to make sharp distributions."""
    torch.manual_seed(seed)
    new_hf_model(tiny_spec(), tie_word_embeddings=tie, initializer_range=0.2).save_pretrained(folder)
