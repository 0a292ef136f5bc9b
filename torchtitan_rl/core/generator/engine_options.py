"""What the engine is told beyond the user's configuration, so that it computes what the trainer computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.core.device import ON_CPU, expandable_segments
from torchtitan_rl.cpu.engine import NORM_PRIORITY

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels have."""

CPU_BLOCK = 32
"""Tokens in a block of the KV cache; vLLM's 128 on a CPU share less of a prompt, and its kernels are no faster with them."""


def engine_options(dtype: Literal["float32", "bfloat16"], tensor_parallel_degree: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for this device, the engine's dtype and its ranks.

    - A bfloat16 engine's output head gives float32 logits, as the trainer's does: bfloat16 ones are rounded to eighths. On a
      CPU `use_wide_head` sees to it.
    - A float32 engine on a GPU needs vLLM's Triton attention; the flash kernels have 16-bit types alone.
    - A CPU engine prefills whole prompts: it forgets half of one that has a seed of its own, as turns of conversations have,
      by setting its random generator back, which a CPU's cannot do.
    - vLLM's own all-reduce shares memory between processes, which a growing allocator segment cannot be.

    Example: engine_options("float32", 1) on a GPU is {"attention_config": {"backend": "TRITON_ATTN"}}.
    """
    options: dict[str, Any] = {}
    if dtype == "bfloat16" and not ON_CPU:
        options["hf_overrides"] = {"head_dtype": "float32"}
    if ON_CPU:
        return options | {
            "block_size": CPU_BLOCK,
            "enable_chunked_prefill": False,
            "ir_op_priority": NORM_PRIORITY,
            "scheduler_cls": "torchtitan_rl.cpu.scheduler.CPUScheduler",
        }
    if dtype == "float32":
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    if tensor_parallel_degree > 1 and expandable_segments():
        options["disable_custom_all_reduce"] = True
    return options


def unlink_shared_memory(ranks: Sequence[int], rank_in_replica: int) -> None:
    """Take the name off the memory that this rank of a CPU engine shares with its siblings; who has it mapped keeps it.

    vLLM names it after the ranks alone and fails where the name is taken, so a killed run would stand in the way of every
    later one on this machine. Called before the engine starts, for what others left, and after, to leave nothing.
    """
    if ON_CPU:
        ending = f"-[{'-'.join(map(str, ranks))}]-cpushm_{rank_in_replica}"
        for path in Path("/dev/shm").glob("*-cpushm_*"):
            if path.name.endswith(ending):
                path.unlink(missing_ok=True)
