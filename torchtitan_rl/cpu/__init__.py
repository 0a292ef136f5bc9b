"""What a CPU computes in other ways than torch, torchtitan and vLLM choose there: faster, with the same results.

docs/cpu.md lists every adaptation with its gain. `TORCHTITAN_RL_CPU=stock` turns all of them off.
"""

import os
from typing import Any, Literal

from torchtitan_rl.core.device import ON_CPU, DeviceHooks, install_hooks
from torchtitan_rl.core.errors import expect
from torchtitan_rl.cpu.products import override_products

SWITCH = "TORCHTITAN_RL_CPU"
MODES = ("fast", "stock")

BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache. vLLM's default of 128 on a CPU shares less of a prompt, and its kernels are no faster with it."""


def mode() -> Literal["fast", "stock"]:
    """The value of TORCHTITAN_RL_CPU, by default "fast". Raises UserError for any value but "fast" and "stock"."""
    given = os.environ.get(SWITCH, "fast")
    expect(given in MODES, SWITCH, given, "fast or stock", "Leave it out for fast.")
    return given


def install() -> None:
    """Install the adaptations before a policy or an engine is built. Does nothing on a GPU or in stock mode.

    Raises:
        UserError: for an unknown mode.
    """
    if mode() == "fast" and ON_CPU:
        override_products()
        install_hooks(DeviceHooks(engine_options=_engine_options))


def _engine_options() -> dict[str, Any]:
    return {"block_size": BLOCK_TOKENS, "scheduler_cls": "torchtitan_rl.cpu.shared_prompts.SharedPrompts"}
