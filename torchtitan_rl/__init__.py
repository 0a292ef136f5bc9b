"""GRPO-family reinforcement learning for TorchTitan models. Importing this package needs no vLLM."""

import os
import sys
from importlib.util import find_spec

if find_spec("torch") is None:  # a script was started with the system's Python
    sys.exit(f"error: {sys.executable} has no torch. Run scripts/setup.sh once and use .venv/bin/python.")

__version__ = "0.1.0"

HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0")
"""The user's own setting, before `device` turns the hub off for libraries. Downloads follow the user's setting."""
