"""Cases of compiled.py, apart from it, because importing it turns torch.compile on."""

CASES: dict[str, dict] = {
    "qwen3": {},
    "qwen3 with KL": {"kl": True},
    "qwen3 with an entropy bonus": {"entropy": 0.01},
    "qwen3 with LoRA": {"rank": 4},
    "qwen3, selective checkpointing": {"activation_checkpoint": "selective"},
    "qwen3, full checkpointing": {"activation_checkpoint": "full"},
    "qwen3, FlexAttention": {"attention": "flex"},
    "olmo2, FlexAttention": {"family": "olmo2", "attention": "flex"},
    **{family: {"family": family} for family in ("qwen2", "llama", "gemma3_text", "olmo2")},
}
QUICK = ["qwen3 with KL"]
"""What the default tests take."""
