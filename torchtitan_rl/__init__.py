"""GRPO-family reinforcement learning for TorchTitan models. Importing this package needs no vLLM."""

__version__ = "0.1.0"
