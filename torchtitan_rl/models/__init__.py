"""What computes: model families, attention, experts, LoRA, log-probabilities in tiles. `hf_config` makes a model from a config.json."""
