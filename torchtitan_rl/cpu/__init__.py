"""Replacements on a CPU for parts of torch, torchtitan and vLLM: faster, with the same results.

docs/cpu.md lists every adaptation with its gain. `TORCHTITAN_RL_CPU=stock` turns all of them off.
"""

import os
from typing import Any, Literal

from torchtitan_rl.core.device import ON_CPU, DeviceHooks, install_hooks
from torchtitan_rl.core.errors import expect
from torchtitan_rl.cpu.products import override_products
from torchtitan_rl.cpu.shared_memory import unlink_shared_memory

SWITCH = "TORCHTITAN_RL_CPU"
MODES = ("fast", "stock")

BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache. With vLLM's 128 on a CPU, prompts share less, and the kernels are no faster."""


def mode() -> Literal["fast", "stock"]:
    """Returns the value of TORCHTITAN_RL_CPU, "fast" by default. Raises UserError for any value but "fast" and "stock"."""
    given = os.environ.get(SWITCH, "fast")
    expect(given in MODES, SWITCH, given, "fast or stock", "Leave it out for fast.")
    return given


def install() -> None:
    """Install the adaptations before a policy or an engine is built. Does nothing on a GPU.

    In stock mode, the engine's shared memory is still unlinked, so that a killed run does not block the next one.

    Raises:
        UserError: for an unknown mode.
    """
    fast = mode() == "fast"
    if not ON_CPU:
        return
    if fast:
        override_products()
        install_hooks(DeviceHooks(_engine_options, unlink_shared_memory))
    else:
        install_hooks(DeviceHooks(unlink_shared_memory=unlink_shared_memory))


def _engine_options() -> dict[str, Any]:
    return {"block_size": BLOCK_TOKENS, "scheduler_cls": "torchtitan_rl.cpu.shared_prompts.SharedPrompts"}
