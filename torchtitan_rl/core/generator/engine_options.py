"""What the engine is told beyond the user's configuration, so that it computes what the trainer computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.core import device
from torchtitan_rl.core.device import ON_CPU, expandable_segments

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels have."""


def engine_options(
    dtype: Literal["float32", "bfloat16"],
    tensor_parallel_degree: int,
    *,
    enforce_eager: bool = False,
    sleep: bool = True,
    gpu_memory_utilization: float = 0.4,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for this device, the engine's dtype and its ranks.

    - A bfloat16 engine's output head gives float32 logits, as the trainer's does: bfloat16 ones are rounded to eighths.
    - A float32 engine on a GPU needs vLLM's Triton attention; the flash kernels have 16-bit types alone.
    - A CPU engine is always eager and never sleeps. It prefills whole prompts: requests with their own seed (each turn of a
      conversation has one) lose half their tokens when preempted, because the CPU generator cannot be rewound.
    - vLLM's own all-reduce shares memory between processes, which a growing allocator segment cannot be.

    The arguments are the fields of `Generator.Config`.
    """
    options: dict[str, Any] = {"hf_overrides": {"head_dtype": "float32"}} if dtype == "bfloat16" else {}
    if ON_CPU:
        options |= {"enforce_eager": True, "enable_sleep_mode": False, "enable_chunked_prefill": False}
        return options | device.hooks.engine_options()
    options |= {
        "enforce_eager": enforce_eager,
        "enable_sleep_mode": sleep,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    if dtype == "float32":
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    if tensor_parallel_degree > 1 and expandable_segments():
        options["disable_custom_all_reduce"] = True
    return options | device.hooks.engine_options()


def unlink_shared_memory(ranks: Sequence[int], rank_in_replica: int) -> None:
    """Take the name off the memory that this rank of a CPU engine shares with its siblings; who has it mapped keeps it.

    vLLM names it after the ranks alone and fails where the name is taken, so a killed run would stand in the way of every
    later one on this machine. Called before the engine starts, for what others left, and after, to leave nothing.
    """
    ending = f"-[{'-'.join(map(str, ranks))}]-cpushm_{rank_in_replica}"
    for path in Path("/dev/shm").glob("*-cpushm_*"):  # a GPU engine has none
        if path.name.endswith(ending):
            path.unlink(missing_ok=True)
