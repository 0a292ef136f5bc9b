"""RMSNorm of a CPU engine in one pass, by a kernel that vLLM's build for CPUs has but does not choose: its own way takes eight."""

import torch
from torch import Tensor

PROVIDER = "torchtitan_rl"


def compiled_norms() -> dict[str, list[str]]:
    """The engine's `ir_op_priority` under which it takes the kernel wherever it can; registers it at the first call."""
    from vllm.ir import ops

    if PROVIDER not in ops.rms_norm.impls:
        ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(_rms_norm)
        ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_sum_fits, inplace=True)(_fused_add_rms_norm)
    return {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _sum_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """[..., D] -> [..., D]; the kernel reads rows that follow one another, which a view of fused projections has not."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Both [..., D], overwritten: the norm of their sum, and the sum."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
