"""vLLM's arguments beyond the user's configuration: they make the engine compute what the trainer computes."""

from typing import TYPE_CHECKING, Any

from torchtitan_rl.core import device
from torchtitan_rl.core.device import ON_CPU, expandable_segments

if TYPE_CHECKING:
    from torchtitan_rl.core.generator.generator import Generator


def engine_options(config: "Generator.Config") -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` that depend on the device, the engine's dtype and its ranks.

    - The output head of a bfloat16 engine gives float32 logits, as the trainer's does. bfloat16 would round them to eighths.
    - A float32 engine on a GPU needs vLLM's Triton attention, because the flash kernels support 16-bit types only.
    - A CPU engine is always eager and never sleeps. It prefills whole prompts: requests with their own seed (each turn of a
      conversation has one) lose half their tokens when preempted, because the CPU generator cannot be rewound.
    - vLLM's own all-reduce shares memory between processes, which does not work with expandable allocator segments.
    """
    options: dict[str, Any] = {"hf_overrides": {"head_dtype": "float32"}} if config.dtype == "bfloat16" else {}
    if ON_CPU:
        options |= {"enforce_eager": True, "enable_sleep_mode": False, "enable_chunked_prefill": False}
        return options | device.hooks.engine_options(config.dtype)
    options |= {
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": config.sleep,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if config.dtype == "float32":
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    if config.tensor_parallel_degree > 1 and expandable_segments():
        options["disable_custom_all_reduce"] = True
    return options | device.hooks.engine_options(config.dtype)
