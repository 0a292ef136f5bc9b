"""Device-dependent settings. Import this module before vLLM.

At import torchtitan picks its device type, with "cuda" as the fallback, and vLLM and Triton read their settings from
the environment. This module therefore acts at import. No other module does.
"""

import os
import sys
import warnings

from torchtitan_rl import PLANNED_GIB
from torchtitan_rl.errors import torch_remedy

try:
    import torch
except ImportError as error:
    sys.exit(f"error: {torch_remedy(error)}")
import torch._utils

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = DEVICE_TYPE == "cpu"
FOR_CPU = ON_CPU and not PLANNED_GIB
"""Whether the config is for a machine without a GPU."""

# The engine runs in the trainer's process, so that weight sync can pass tensors.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Otherwise Triton's float32 products, and so a float32 engine's attention, use TF32: 10 bits of each factor.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# Checkpoints are local folders. Otherwise transformers asks the hub about each of them. Only run/hub.py downloads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if ON_CPU:
    torch._utils._get_available_device_type = lambda: "cpu"
    # torchtitan's modules that were imported before this one have already chosen CUDA.
    for _name, _module in list(sys.modules.items()):
        if _name.startswith("torchtitan.") and hasattr(_module, "device_type"):
            _module.device_type, _module.device_module = "cpu", torch.cpu
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB per rank
    # vLLM would compile one function, the ranks of sampled tokens, which needs a C++ compiler.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # torchtitan's routers ask for float32, which a CPU's autocast does not have: see `models/experts.py`.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    # Ranks that share cores must not be pinned to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def compute_capability() -> tuple[int, int]:
    """Compute capability of this rank's GPU: (8, 0) Ampere, (9, 0) Hopper, (10, 0) Blackwell; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
