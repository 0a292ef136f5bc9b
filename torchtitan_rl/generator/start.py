"""Starts a generator's vLLM engine in this process."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import torch.distributed as dist

from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.generator_config import GeneratorConfig
from torchtitan_rl.generator.patches import fuse_norms, name_shared_memory

if TYPE_CHECKING:
    from vllm import LLM

CPU_BLOCK_TOKENS = 32
"""Tokens in a block of a CPU engine's KV cache. vLLM's 128 let shorter prompts share nothing, and are no faster."""

NEED_TORCHVISION = ("Qwen3_5ForCausalLM",)
"""Architectures of text whose module in vLLM imports torchvision, for images."""

TORCHVISION = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
"""What it imports of it."""


def start_engine(
    config: GeneratorConfig, hf_assets_path: str, norms_round_once: bool = False, **options: Any
) -> "LLM":
    """Returns vLLM's engine with empty weights. `options`: further keyword arguments of `vllm.LLM`; otherwise as for `Generator`."""
    from vllm import LLM

    degree = config.tensor_parallel_degree
    replica, rank_in_replica = divmod(dist.get_rank(), degree)
    siblings = range(replica * degree, (replica + 1) * degree)
    job = os.environ["MASTER_PORT"]
    if ON_CPU and config.dtype == "bfloat16" and norms_round_once:
        options["ir_op_priority"] = fuse_norms()
    if ON_CPU:
        name_shared_memory(job)
    unlink_shared_memory(job, siblings, rank_in_replica)  # left by a killed run
    is_hybrid = import_engine_model(hf_assets_path)
    before = {"RANK": os.environ["RANK"], "LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}
    os.environ["RANK"] = str(dist.get_rank())  # vLLM reads it
    try:
        llm = LLM(
            model=hf_assets_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=degree,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",  # at the sampling temperature, like the trainer's
            enable_prefix_caching=not is_hybrid,  # a prefix's state would have to be cached too
            disable_log_stats=False,
            **engine_options(config),
            **options,
        )
    finally:
        # A CPU engine names two libraries in LD_PRELOAD for worker processes, which it does not have here. Programs that rewards
        # and tools start would load them too.
        os.environ |= before
    unlink_shared_memory(job, siblings, rank_in_replica)
    return llm


def engine_options(config: GeneratorConfig) -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` that depend on the device, the engine's dtype and its ranks.

    - The output head of a bfloat16 engine gives float32 logits, as the trainer's does. bfloat16 would round them to
      eighths.
    - A float32 engine on a GPU needs vLLM's Triton attention, because the flash kernels support 16-bit types only.
    - A CPU engine is always eager and never sleeps. It prefills whole prompts: requests with their own seed (each
      turn of a conversation has one) lose half their tokens when preempted, because the CPU generator cannot be
      rewound.
    - vLLM's own all-reduce shares memory between processes, which does not work with expandable allocator segments.
    """
    options: dict[str, Any] = (
        {"hf_overrides": {"head_dtype": "float32"}} if config.dtype == "bfloat16" else {}
    )
    if ON_CPU:
        options |= {
            "enforce_eager": True,
            "enable_sleep_mode": False,
            "enable_chunked_prefill": False,
            "block_size": CPU_BLOCK_TOKENS,
        }
        return options
    options |= {
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": bool(config.sleep),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "moe_backend": "triton",  # others rearrange the weights of experts, which could then not be proven
        "enable_return_routed_experts": config.router_replay,
    }
    if config.dtype == "float32":
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if config.tensor_parallel_degree > 1 and "expandable_segments:True" in settings:
        options["disable_custom_all_reduce"] = True
    return options


def unlink_shared_memory(job: str, ranks: Sequence[int], rank_in_replica: int) -> None:
    """Remove the names of the memory that this rank of a CPU engine shares with its other `ranks`. Mappings stay valid.

    vLLM fails if the name exists, so a killed run would block later ones with the same MASTER_PORT, which is `job`.
    """
    for path in Path("/dev/shm").glob(f"{job}-*"):
        if path.name.endswith(f"-{list(ranks)}_{rank_in_replica}"):
            path.unlink(missing_ok=True)


def import_engine_model(hf_assets_path: str) -> bool:
    """Import the engine's model class here. Returns whether it is a hybrid, with layers that carry a state.

    vLLM would do it in a process that imports vLLM again, 10 s of a CPU, to leave CUDA alone. The trainer has initialized
    CUDA already.
    """
    from vllm import ModelRegistry

    is_hybrid = False
    entries = json.loads(Path(hf_assets_path, "config.json").read_text())
    for architecture in entries.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known:
            with torchvision_stand_in() if architecture in NEED_TORCHVISION else nullcontext():
                model_class = known.load_model_cls()
            ModelRegistry.register_model(architecture, model_class)
            is_hybrid |= getattr(model_class, "is_hybrid", False)
    return is_hybrid


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Within the context, torchvision can be imported if it is not installed. Nothing in it works. PyPI's build needs CUDA."""
    if find_spec("torchvision") is not None:
        yield
        return
    for name in TORCHVISION:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    try:
        yield
    finally:
        for name in TORCHVISION:
            del sys.modules[name]
