"""A tiny random Qwen3 for tests, with the debug configs' tokenizer when one is asked for."""

from pathlib import Path

import torch

from torchtitan_rl.models import small_qwen3

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
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    d = DIMENSIONS
    config = Qwen3Config(
        vocab_size=d["vocab_size"],
        hidden_size=d["dim"],
        intermediate_size=d["hidden_dim"],
        num_hidden_layers=d["n_layers"],
        num_attention_heads=d["n_heads"],
        num_key_value_heads=d["n_kv_heads"],
        head_dim=d["head_dim"],
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
