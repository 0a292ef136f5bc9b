"""What computes: model families, attention, experts, LoRA, log-probabilities in tiles. `hf_config` makes a model from a config.json."""

from torchtitan_rl.models.hf_config import (
    hf_architecture,
    new_hf_model,
    small_qwen3,
    spec_from_folder,
)
