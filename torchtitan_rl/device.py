"""What differs between a machine with a GPU and one without, decided once and imported before torchtitan and vLLM.

torchtitan picks its device type while it is imported and falls back to "cuda"; vLLM reads its settings from the
environment while it is imported. So this module has import-time effects, and it is the only one that has.
"""

import os
import sys

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = DEVICE_TYPE == "cpu"

# The engine lives in the trainer's process: weight sync passes tensors, not files or messages.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Checkpoints are local folders; without this transformers asks the hub about each of them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if ON_CPU:
    _utils = sys.modules.get("torchtitan.tools.utils")
    if _utils is not None and _utils.device_type != "cpu":
        raise ImportError(
            "torchtitan was imported before torchtitan_rl.device and has chosen CUDA; import this module first."
        )
    torch._utils._get_available_device_type = lambda: "cpu"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB a rank
    # Ranks that share cores must not be pinned to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def adapt_fsdp(model: nn.Module) -> None:
    """Make FSDP2's gradient reduction run on gloo, which has no pre-multiplied sum. No effect on a GPU."""
    if not ON_CPU:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def compute_capability() -> tuple[int, int]:
    """This rank's GPU generation: (8, 0) for Ampere, (9, 0) for Hopper, (10, 0) for Blackwell; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def peak_memory_bytes() -> int:
    """The most memory held so far: allocated on the GPU, or the process's resident set without one."""
    if not ON_CPU:
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops_per_s() -> float | None:
    """This GPU's dense bfloat16 peak by torchtitan's table; None without a GPU."""
    if ON_CPU:
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name())
