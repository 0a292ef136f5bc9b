"""GRPO-family reinforcement learning for TorchTitan models. Importing this package needs no torch.

`torchtitan_rl.train(model, rows, rewards)` is a run from a notebook or a script, and `torchtitan_rl.grade(texts, config)` grades
sample answers: see `torchtitan_rl.api`.
"""

import os
from typing import Any

__version__ = "0.1.0"

HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0")
"""The user's own setting, before `device` turns the hub off for libraries. Downloads follow the user's setting."""

PLANNED_GIB = int(os.environ.get("TORCHTITAN_RL_PLANNED_GIB", "0"))
"""Memory of each GPU that a dry run plans for; 0: it is about this machine."""


def __getattr__(name: str) -> Any:
    if name not in ("train", "grade"):
        raise AttributeError(f"module {__name__} has no {name}")
    # Imported when it is asked for: most modules of this package do without it.
    from torchtitan_rl import api

    return getattr(api, name)
