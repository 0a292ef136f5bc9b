"""Names of the cases of compiled.py, apart from it, because importing it turns torch.compile on."""

CASE_NAMES = [
    "qwen3", "qwen3 with KL", "qwen3 with an entropy bonus", "qwen3 with LoRA", "qwen3, selective checkpointing",
    "qwen3, full checkpointing", "qwen2", "llama", "gemma3_text", "olmo2",
]  # fmt: skip
QUICK = ["qwen3 with KL"]
"""What the default tests take."""
