"""Makes torch.cuda answer as on a node of H100s. Import this module before torchtitan_rl."""

import os
from types import SimpleNamespace

from tests.gpu_rehearsal import native

native.load()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.gpu_rehearsal import streams  # noqa: E402

TOTAL_BYTES = 85_029_158_912
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"


class FakeCuda(FakeTensorMode):
    """Tensors that know device "cuda" and have no data."""

    avoid_device_init = True


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)


def _rms_norm_backward(g: Tensor, x: Tensor, shape: list[int], r: Tensor, weight: Tensor | None, mask: list[bool]):  # noqa: ANN202
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


_kernels = torch.library.Library("aten", "IMPL")
# Without a CUDA kernel autograd takes the norm apart and keeps float32 copies, which a GPU does not.
_kernels.impl("_fused_rms_norm", _rms_norm, "CUDA")
_kernels.impl("_fused_rms_norm_backward", _rms_norm_backward, "CUDA")


def _patch() -> None:
    properties = SimpleNamespace(
        total_memory=TOTAL_BYTES, name=NAME, major=9, minor=0, multi_processor_count=132, warp_size=32,
        gcnArchName="", max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    constants = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "is_current_stream_capturing": False,
        "device_count": 8, "_device_count_nvml": 8, "current_device": 0, "get_device_capability": CAPABILITY,
        "get_device_name": NAME, "get_device_properties": properties, "mem_get_info": (TOTAL_BYTES // 2, TOTAL_BYTES),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "memory_stats": {}, "_lazy_init": None,
        "init": None, "set_device": None, "empty_cache": None, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = streams.Stream, streams.Event, streams.stream
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_: streams.current()
    torch.cuda.default_stream = lambda *_: streams._stack[0]
    torch.cuda.synchronize = lambda *_: streams.host_waits()
    torch.accelerator.is_available, torch.accelerator.current_device_index = lambda: True, lambda: 0
    torch._utils._get_available_device_type = lambda: "cuda"


_patch()
for _name, _value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29511}.items():
    os.environ.setdefault(_name, str(_value))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
