"""GRPO-family reinforcement learning for TorchTitan models. Importing this package needs no vLLM."""

import os

__version__ = "0.1.0"

HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0")
"""What the user said about it, before `device` keeps libraries from asking the hub; who downloads asks this."""
