"""What differs between a machine with a GPU and one without, decided once and imported before torchtitan and vLLM.

torchtitan picks its device type while it is imported and falls back to "cuda"; vLLM and Triton read their settings from the
environment while they are imported. So this module has import-time effects, and it is the only one that has.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from vllm import LLM

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = DEVICE_TYPE == "cpu"

# The engine lives in the trainer's process: weight sync passes tensors, not files or messages.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Triton's float32 products keep 10 bits of each factor (TF32) otherwise, and with them a float32 engine's attention.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# Checkpoints are local folders; without this transformers asks the hub about each of them. run/hub.py alone downloads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if ON_CPU:
    _utils = sys.modules.get("torchtitan.tools.utils")
    if _utils is not None and _utils.device_type != "cpu":
        raise ImportError(
            "torchtitan was imported before torchtitan_rl.core.device and has chosen CUDA; import this module first."
        )
    torch._utils._get_available_device_type = lambda: "cpu"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB a rank
    # vLLM compiles the function that counts ranks of sampled tokens, which needs a C++ compiler. Nothing else is compiled here.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Ranks that share cores must not be pinned to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch's GPU allocator reads its settings from; the first that is set wins."""


@dataclass(frozen=True)
class DeviceHooks:
    """Changes to the engine on one kind of device. The defaults change nothing."""

    engine_options: Callable[[], dict[str, Any]] = dict
    """Returns more keyword arguments of `vllm.LLM`. They override the core's."""
    unlink_shared_memory: Callable[[Sequence[int], int], None] = lambda ranks, rank_in_replica: None
    """Called before and after an engine starts, with the ranks that share it and this rank's place among them."""


hooks = DeviceHooks()


def install_hooks(new: DeviceHooks) -> None:
    """Use these in every engine that is built from now on."""
    global hooks
    hooks = new


def replace_engine_parts(llm: "LLM", tokenizer: Any, stats: Any) -> None:
    """Give an engine the tokenizer that the run has loaded, which finds stop texts (SamplingConfig.stop), and its statistics.

    Args:
        stats: called in place of vLLM's Prometheus histograms (see observability/engine_stats.py); None: nothing is.
    """
    llm.llm_engine.output_processor.tokenizer = tokenizer
    if stats is not None:
        llm.llm_engine.logger_manager = stats


def adapt_fsdp(model: nn.Module) -> None:
    """Make FSDP2's gradient reduction run on gloo, which has no pre-multiplied sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(ON_CPU)


def expandable_segments() -> bool:
    """Whether the user's environment makes PyTorch's GPU allocator grow its segments in place."""
    settings = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    return bool(re.search(r"expandable_segments\s*:\s*(True|1)\b", settings, re.IGNORECASE))


def compute_capability() -> tuple[int, int]:
    """This rank's GPU generation: (8, 0) for Ampere, (9, 0) for Hopper, (10, 0) for Blackwell; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def gpu_memory_bytes() -> int | None:
    """All memory of this rank's GPU; None without one. Makes no CUDA context, so it may be asked before the device is set."""
    if ON_CPU:
        return None
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
