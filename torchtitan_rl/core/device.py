"""Device-dependent settings. Import this module before vLLM.

At import torchtitan picks its device type, with "cuda" as the fallback, and vLLM and Triton read their settings from
the environment. This module therefore acts at import. No other module does.
"""

import copy
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

try:
    import torch
except ModuleNotFoundError:  # a script was started with the system's Python
    sys.exit(
        f"error: {sys.executable} has no torch. Run scripts/setup.sh once and use .venv/bin/python."
    )
import torch._utils
from torch import nn

if TYPE_CHECKING:
    from vllm import LLM

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = DEVICE_TYPE == "cpu"

# The engine runs in the trainer's process, so that weight sync can pass tensors.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Otherwise Triton's float32 products, and so a float32 engine's attention, use TF32: 10 bits of each factor.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# Checkpoints are local folders. Otherwise transformers asks the hub about each of them. Only setup/hub.py downloads.
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
    # torchtitan's routers ask for float32, which a CPU's autocast does not have: see `experts.Float32Gate`.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype", UserWarning)
    # Ranks that share cores must not be pinned to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


NEED_TORCHVISION = ("Qwen3_5ForCausalLM",)
"""Architectures of text whose module in vLLM imports torchvision, for images."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of PyTorch's GPU allocator. The first one that is set wins."""


def unlink_shared_memory(ranks: Sequence[int], rank_in_replica: int) -> None:
    """Remove the name of the memory that this rank of a CPU engine shares with its other `ranks`. Mappings stay valid.

    vLLM derives the name from the ranks alone and fails if it exists, so a killed run would block every later one.
    """
    ending = f"-[{'-'.join(map(str, ranks))}]-cpushm_{rank_in_replica}"
    for path in Path("/dev/shm").glob("*-cpushm_*"):
        if path.name.endswith(ending):
            path.unlink(missing_ok=True)


def import_engine_model(hf_assets_path: str) -> bool:
    """Import the engine's model class here. Returns whether it is a hybrid, with layers that carry a state. vLLM would do it in a process that imports vLLM again, 10 s of a CPU, to
    leave CUDA alone.

    The trainer has initialized CUDA already. vLLM itself refuses an architecture that it does not know.
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


class _Anything(ModuleType):
    """A module of any name, with any attribute."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


class _StandIn(MetaPathFinder, Loader):
    """Finds torchvision and all below it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        own = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Within the context, torchvision can be imported if it is not installed. Nothing in it works. PyPI's build needs CUDA."""
    if find_spec("torchvision") is not None:
        yield
        return
    finder = _StandIn()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


@contextmanager
def without_preloads() -> Iterator[None]:
    """Restore LD_PRELOAD afterwards. A CPU engine names two libraries in it for worker processes, which it does not
    have here.

    Programs that rewards and tools start would load them too. The loader splits the variable at spaces and prints an
    error for each part, so the libraries of an environment whose path has one are named here, from the current
    folder.
    """
    before = os.environ.get("LD_PRELOAD")
    packages = Path(torch.__file__).parents[1]
    if ON_CPU and before is None and " " in str(packages):
        libraries = [
            *packages.glob("torch/lib/libgomp*.so*"),
            *packages.glob("vllm/libs/libtcmalloc*.so*"),
        ]
        paths = [os.path.relpath(library) for library in libraries]
        os.environ["LD_PRELOAD"] = ":".join(paths)
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if before is not None:
            os.environ["LD_PRELOAD"] = before


def replace_engine_parts(llm: "LLM", tokenizer: Any, stats: Any) -> None:
    """Replace an engine's tokenizer, which finds stop texts (SamplingConfig.stop), and its statistics.

    Args:
        stats: replaces vLLM's Prometheus histograms (see observability/engine_stats.py). None: no statistics.
    """
    llm.llm_engine.output_processor.tokenizer = tokenizer
    if stats is not None:
        llm.llm_engine.logger_manager = stats


class WideHead:
    """The float32 copy of a bfloat16 CPU engine's output head. Without one, vLLM casts the head at each decode step."""

    def __init__(self, model: nn.Module) -> None:
        # vLLM's Cohere and Gemma 2 have no head beside their tied embedding.
        self.source = model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens
        self.weight = self.source.weight.float()  # [Vs, D]
        head = copy.copy(self.source)
        head._parameters = {
            **self.source._parameters,
            "weight": nn.Parameter(self.weight, requires_grad=False),
        }
        # Not a submodule: vLLM would look for its weights in each reload.
        model.logits_processor.register_forward_pre_hook(
            lambda _, args: (head, *args[1:]) if args[0] is self.source else None
        )

    def refresh(self) -> None:
        """Copy the weights that the engine has now."""
        self.weight.copy_(self.source.weight)

    def is_current(self) -> bool:
        """Whether it equals the engine's own head, bit for bit."""
        return torch.equal(self.weight, self.source.weight.float())


def repack_experts(model: nn.Module) -> None:
    """Let a CPU engine's next reload pack the weights of experts anew. vLLM packs them while it makes a layer's kernel,
    which it does once; a later reload would copy weights as they are into packed ones.

    A GPU engine does not pack them, and its CUDA graphs need the first kernel.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def adapt_fsdp(model: nn.Module) -> None:
    """Let FSDP2 reduce gradients on gloo, which has no pre-multiplied sum."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(ON_CPU)


def expandable_segments() -> bool:
    """Whether the environment enables growing segments in PyTorch's GPU allocator."""
    settings = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    return bool(re.search(r"expandable_segments\s*:\s*(True|1)\b", settings, re.IGNORECASE))


def compute_capability() -> tuple[int, int]:
    """Compute capability of this rank's GPU: (8, 0) Ampere, (9, 0) Hopper, (10, 0) Blackwell; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
