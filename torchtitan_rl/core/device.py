"""What differs between a machine with a GPU and one without, decided once and imported before torchtitan and vLLM.

torchtitan picks its device type while it is imported and falls back to "cuda"; vLLM and Triton read their settings from the
environment while they are imported. So this module has import-time effects, and it is the only one that has.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_rl.core.errors import UserError

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
    # Ranks that share cores must not be pinned to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def _keep_freed_memory() -> None:
    """Let glibc hand out freed memory again instead of giving the free end of its heap back to the system.

    The system hands pages out anew in the next layer, micro-batch and step: a quarter of a large update's processor time on a
    virtual machine. The most that is in use stays what it was. Larger blocks do go back, as they do by default: in the heap, a
    hole of a tensor's exact size is too small for the next aligned one, and a heap of large holes grows without end.
    """
    trim_threshold, mmap_threshold, never = -1, -3, -1
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # another C library, or macOS, has none
        libc.mallopt(trim_threshold, never)
        libc.mallopt(mmap_threshold, 2**25)  # bytes, the highest that glibc chooses by itself


if ON_CPU:
    _keep_freed_memory()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] on a CPU: float32 by oneDNN, in full precision, anything else as PyTorch does it.

    PyTorch takes float32 products to MKL, which gives other makers' processors its AVX2 kernels: 90 GFLOP/s a core of an AMD
    Zen 5, where oneDNN's AVX-512 reaches 200. Below some size its set-up costs more than it saves.
    """
    fits = a.dtype == b.dtype == torch.float32 and a.shape[1] == b.shape[0]
    if fits and min(*a.shape, b.shape[1]) >= 16:
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


if ON_CPU and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
    # For the trunk, its backward, the head and DTensor's local products alike; kept, for it ends with its object.
    _products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        _products.impl("mm", _product, "CPU", allow_override=True)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch's GPU allocator reads its settings from; the first that is set wins."""

OLDEST_DRIVER = 580
"""Major version of the NVIDIA driver that the CUDA 13 wheels of the pinned torch need."""


def check_environment(*, gpu_expected: bool = True) -> None:
    """Check that the installed builds of torch and vLLM fit one another and, where they are for a GPU, find one.

    Without this a driver that is too old, or a CPU build of torch that outranked the CUDA one, ends in CPU mode and in an
    obscure error of vLLM later.

    Args:
        gpu_expected: False on a login node, which is set up for GPUs that it does not have.

    Raises:
        UserError: naming the builds, the driver's version and the remedy.
    """
    set_up_again = "rm -rf .venv && TORCHTITAN_RL_KIND=gpu scripts/setup.sh"
    if torch.version.hip is not None:
        raise UserError(
            f"torch {torch.__version__} is a ROCm build: AMD GPUs are not supported yet, NVIDIA's alone. To train on the "
            "CPU: rm -rf .venv && TORCHTITAN_RL_KIND=cpu scripts/setup.sh."
        )
    if environment_kind() == "cpu":
        if not ON_CPU:
            raise UserError(
                f"vllm-cpu is installed, but torch {torch.__version__} sees a GPU. Set up again: {set_up_again}"
            )
        return
    if torch.version.cuda is None:
        raise UserError(
            f"the CUDA build of vLLM is installed beside torch {torch.__version__}, a CPU build: a package index or a pip "
            f"setting prefers it. Set up again without that: {set_up_again}"
        )
    if gpu_expected and ON_CPU:
        raise UserError(
            f"the environment is for GPUs (torch {torch.__version__}, CUDA {torch.version.cuda}), but torch finds none it "
            f"can use; {_driver_state()} For a machine without one: TORCHTITAN_RL_KIND=cpu scripts/setup.sh."
        )


def environment_kind() -> str:
    """Whether scripts/setup.sh installed vLLM's build for "gpu" or for "cpu"."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


def _driver_state() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "no NVIDIA driver is loaded (is the GPU passed to this container or job?)."
    version = re.search(r"\b(\d+)\.\d[\d.]*", text)
    if version is None:
        return f"its NVIDIA driver's version is unknown; CUDA 13 needs {OLDEST_DRIVER} or newer."
    if int(version[1]) < OLDEST_DRIVER:
        return f"its NVIDIA driver {version[0]} is too old: CUDA 13 needs {OLDEST_DRIVER} or newer. Update the driver."
    return (
        f"its NVIDIA driver is {version[0]}, which is new enough: see CUDA_VISIBLE_DEVICES "
        f"({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}) and nvidia-smi."
    )


class _ReduceScatterOfOne:
    """FSDP2's reduce-scatter where one rank has everything: the sum is given the memory of what is summed, so nothing is copied.

    A reduction asks for two buffers of one size, the packed gradients and then their sum, which become the gradients' memory.
    """

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[elements], the same for the two calls of a reduction."""
        packed, self._packed = self._packed, None
        if packed is None:
            packed = self._packed = torch.empty(*size, dtype=dtype, device=device)
        return packed


def adapt_fsdp(model: nn.Module) -> None:
    """Make FSDP2's gradient reduction run on gloo, which has no pre-multiplied sum, and let one rank's gradients be.

    torchtitan has them divided by 1 in place of the number of ranks. Alone, FSDP2 does that to a copy of every gradient; its own
    factor is the same there and costs nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(ON_CPU)
            if dist.get_world_size() == 1:
                module.set_gradient_divide_factor(None)
                module.set_custom_reduce_scatter(_ReduceScatterOfOne())


def expandable_segments() -> bool:
    """Whether the user's environment makes PyTorch's GPU allocator grow its segments in place."""
    settings = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    return bool(re.search(r"expandable_segments\s*:\s*(True|1)\b", settings, re.IGNORECASE))


def engine_start_note() -> str:
    """What the engine's start may wait for besides itself, for the line that says that it starts; "" for nothing."""
    if ON_CPU or shutil.which("nvcc") is None or importlib.util.find_spec("flashinfer") is None:
        return ""
    return " (FlashInfer may compile kernels with nvcc, minutes, the first time on a machine)"


def compute_capability() -> tuple[int, int]:
    """This rank's GPU generation: (8, 0) for Ampere, (9, 0) for Hopper, (10, 0) for Blackwell; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def gpu_memory_bytes() -> int | None:
    """All memory of this rank's GPU; None without one. Makes no CUDA context, so it may be asked before the device is set."""
    if ON_CPU:
        return None
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory


_highest_sample = 0  # bytes; here because every phase of a step may add to it and one place reports it


def sample_memory() -> int:
    """Bytes in use now: on this rank's GPU by anyone, or this process's resident set without one.

    Call it at the end of a phase: PyTorch's allocator keeps what a phase took until the engine wakes, so that this is the
    phase's peak. PyTorch's own peak counts the engine's memory also while it sleeps and that memory is given back.
    """
    global _highest_sample
    if ON_CPU:
        used = _resident_bytes()
    else:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    _highest_sample = max(_highest_sample, used)
    return used


def peak_memory_bytes() -> int:
    """The highest sample since this was last called, that of now included."""
    global _highest_sample
    sample_memory()
    highest, _highest_sample = _highest_sample, 0
    return highest


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS, which tells the highest alone, in bytes
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_flops_per_s() -> float | None:
    """This GPU's dense bfloat16 peak by torchtitan's table; None without a GPU."""
    if ON_CPU:
        return None
    from torchtitan.tools.utils import get_peak_flops

    return get_peak_flops(torch.cuda.get_device_name())
