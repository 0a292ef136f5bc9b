"""RMSNorm for a CPU in half the passes over memory that PyTorch's composite and its derivative take there."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm


class _RMSNormFunction(torch.autograd.Function):
    """y = w n with n = x r and r = (mean(x²) + eps)^-½; dx = r (w g - n mean(w g n)), dw = Σ g n. In float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ANN001
        """x [..., D], weight [D] -> [..., D] in x's dtype."""
        x32 = x.float()
        scale = torch.linalg.vecdot(x32, x32).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]  # [..., 1]
        normed = x32 * scale  # [..., D]
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        """grad [..., D] -> the gradients to x [..., D] and weight [D]."""
        normed, scale, weight = ctx.saved_tensors
        grad32 = grad.float()
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0)  # [D]
        out = grad32 * weight  # [..., D]
        along = torch.linalg.vecdot(out, normed).div_(normed.shape[-1])[..., None]  # [..., 1]
        out.addcmul_(normed, along, value=-1).mul_(scale)
        return out.to(grad.dtype), grad_weight.to(weight.dtype), None


class CpuRMSNorm(RMSNorm):
    """An RMSNorm as torchtitan's, of plain tensors on a CPU; a DTensor takes PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        if isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return _RMSNormFunction.apply(x, self.weight, self.eps)


def use_cpu_norms(model: nn.Module) -> None:
    """Make every RMSNorm of the model, weights and hooks as they are, a CpuRMSNorm."""
    for module in model.modules():
        if type(module) is RMSNorm and module.elementwise_affine:
            module.__class__ = CpuRMSNorm
