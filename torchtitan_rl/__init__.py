"""GRPO-family reinforcement learning for TorchTitan models. Importing this package needs no vLLM."""

import os

__version__ = "0.1.0"

HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0")
"""The user's own setting, before `device` turns the hub off for libraries. Downloads follow the user's setting."""
