"""Gradients that one CPU rank adds up in float32 as a backward makes them, in memory that it keeps from step to step.

FSDP2 would make bfloat16 ones of all weights, copies of them in float32 and one more for a reduction over ranks that are not there.
On a CPU the system hands out such memory anew each time, page by page, which takes longer than the arithmetic with it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.models.common.embedding import Embedding


class KeptGradient:
    """One parameter's: it is the parameter's `grad` from the first addition until the optimizer drops that."""

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        self._memory = torch.empty_like(parameter, requires_grad=False)  # none in truth before it is written

    def sum(self) -> Tensor:
        """What has been added so far, to add to; of the parameter's shape, in its dtype."""
        if self._parameter.grad is None:
            self._parameter.grad = self._memory.zero_()
        return self._memory.to_local()

    def take(self, gathered: nn.Parameter) -> None:
        """Add what a backward has left at the parameter that the forward used, if anything, and free it."""
        if gathered.grad is not None:
            self.sum().add_(gathered.grad)
            gathered.grad = None


def kept_gradient(weight: Tensor) -> KeptGradient | None:
    """What a backward that makes this weight's gradient piece by piece may add the pieces to, returning none itself."""
    return getattr(weight, "kept_gradient", None)


def keep_gradients(model: nn.Module) -> None:
    """Let every parameter of a model, which FSDP2 wraps for one rank on a CPU, add up its gradients so."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = list(model.parameters())
    for unit in units:
        unit.unshard()
    for parameter, gathered in zip(parameters, model.parameters(), strict=True):
        gathered.kept_gradient = KeptGradient(parameter)
        gathered.register_post_accumulate_grad_hook(gathered.kept_gradient.take)
    for unit in units:
        unit.reshard()


class _Rows(torch.autograd.Function):
    """Rows of a table whose gradient is only added to in those rows, where PyTorch makes one of mostly zeros."""

    @staticmethod
    def forward(ctx, table: Tensor, rows: Tensor, kept: KeptGradient) -> Tensor:  # noqa: ANN001
        """table [V, D], rows [...] -> [..., D]"""
        ctx.save_for_backward(rows)
        ctx.kept = kept
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, None]:  # noqa: ANN001
        """grad [..., D]"""
        (rows,) = ctx.saved_tensors
        total = ctx.kept.sum()  # [V, D]
        total.index_add_(0, rows.flatten(), grad.flatten(0, -2).to(total.dtype))
        return None, None, None


class RowEmbedding(Embedding):
    """torchtitan's embedding, which adds to a kept gradient only what it has used."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """[...] token ids -> [..., D]"""
        kept = kept_gradient(self.weight)
        return super().forward(input) if kept is None else _Rows.apply(self.weight, input, kept)
