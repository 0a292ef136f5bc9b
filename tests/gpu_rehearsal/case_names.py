"""Names of the cases of compiled.py, apart from it, because importing it turns torch.compile on."""

CASE_NAMES = [
    "qwen3", "qwen3 with KL", "qwen3 with an entropy bonus", "qwen3 with LoRA", "qwen3, selective checkpointing",
    "qwen3, full checkpointing", "qwen2", "llama", "gemma3_text", "olmo2", "qwen3, shared prompts",
    "qwen3, shared prompts, KL, full checkpointing", "gemma3_text, shared prompts, selective checkpointing",
]  # fmt: skip
QUICK = ["qwen3 with KL", "qwen3, shared prompts"]
"""What the default tests take."""
