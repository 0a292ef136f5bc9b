"""Makes torch.cuda answer as on a node of H100s. Import this module before torchtitan_rl."""

import os

from tests.gpu_rehearsal import native

native.load()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.gpu_rehearsal import machine, streams  # noqa: E402


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

machine.answer_as_cuda()
torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = streams.Stream, streams.Event, streams.stream
torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_: streams.current()
torch.cuda.synchronize = lambda *_: streams.host_waits()
torch.cuda.is_initialized = torch.accelerator.is_available = lambda: True
torch.accelerator.current_device_index = lambda: 0
for _name, _value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29511}.items():
    os.environ.setdefault(_name, str(_value))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
