"""What the engine is told beyond the user's configuration, so that it computes what the trainer computes."""

from typing import Any, Literal

from torchtitan_rl.device import ON_CPU, expandable_segments


def engine_options(dtype: Literal["float32", "bfloat16"], tensor_parallel_degree: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for this device, the engine's dtype and its ranks.

    - A bfloat16 engine's output head gives float32 logits, as the trainer's does: bfloat16 ones are rounded to eighths.
    - A float32 engine on a GPU needs vLLM's Triton attention; the flash kernels have 16-bit types alone.
    - vLLM's own all-reduce shares memory between processes, which a growing allocator segment cannot be.

    Example: engine_options("float32", 1) on a GPU is {"attention_config": {"backend": "TRITON_ATTN"}}.
    """
    options: dict[str, Any] = {}
    if dtype == "bfloat16":
        options["hf_overrides"] = {"head_dtype": "float32"}
    if ON_CPU:
        return options
    if dtype == "float32":
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    if tensor_parallel_degree > 1 and expandable_segments():
        options["disable_custom_all_reduce"] = True
    return options
