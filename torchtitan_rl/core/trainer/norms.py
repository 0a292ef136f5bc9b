"""Norms of the last optimizer step and of the weights, over the whole sharded model."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.core.device import DEVICE_TYPE

BLOCK = 2**20
"""Elements of a shard per block. Temporaries then fit in a CPU's last-level cache and stay small on a GPU. With smaller
blocks, waking the CPU's threads takes as long as the work."""


class MeasuredSteps:
    """Takes the steps of any optimizer and measures the last one."""

    def __init__(self, optimizer: OptimizersContainer) -> None:
        self._optimizer = optimizer
        self._squares: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Take a step. During it there is a copy of the weights whose update cannot be computed from Adam's moments."""
        before: dict[Tensor, Tensor] = {}
        for optimizer in self._optimizer:
            if _is_adam(optimizer):
                continue
            for group in optimizer.param_groups:
                for p in group["params"]:
                    before[p] = local_shard(p).clone()
        self._optimizer.step()
        self._squares = {}
        for p in list(before):
            # `pop` frees one copy at a time.
            self._squares[p] = _square(local_shard(p) - before.pop(p))

    @torch.no_grad()
    def update_and_weight_norm(self) -> tuple[float, float]:
        """Returns (‖last update‖, ‖weights‖), the same on every rank. Collective.

        The update of Adam and AdamW is without weight decay, and recomputed from the moments, so that no copy of the
        weights is made. That of another optimizer is the whole change of the weights. It is 0 for a parameter that
        has not been updated. The second norm is NaN or infinite if any weight is.
        """
        squares: list[Tensor] = []
        for optimizer in self._optimizer:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    of_update = self._square_of_update(optimizer, p, group)  # 0-d
                    both = torch.stack([of_update, _square(local_shard(p))])  # [2]
                    squares.append(both * _share_of_ranks(p))
        total = torch.stack(squares).sum(0)  # [2]
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        update, weights = total.sqrt().tolist()
        return update, weights

    def _square_of_update(self, optimizer: Optimizer, p: Tensor, group: dict) -> Tensor:
        """Σ update² over this rank's shard, 0-d."""
        state = optimizer.state.get(p)
        if _is_adam(optimizer) and state:
            return _square_of_adam(state, group)
        return self._squares.get(p, torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE))


def _is_adam(optimizer: Optimizer) -> bool:
    """Whether `_square_of_adam` is this optimizer's update. A subclass may compute another one."""
    return type(optimizer) in (Adam, AdamW) and not any(
        group["amsgrad"] for group in optimizer.param_groups
    )


def _square_of_adam(state: dict[str, Tensor], group: dict) -> Tensor:
    """Σ (lr · m̂ / (√v̂ + eps))² over this rank's shard, 0-d.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.
    """
    step = state["step"].double()  # 0-d; stays on its device: no synchronization
    beta1, beta2 = group["betas"]
    scale = group["lr"] / (1 - beta1**step)
    bias = 1 - beta2**step
    first_moments = local_shard(state["exp_avg"]).flatten().split(BLOCK)
    second_moments = local_shard(state["exp_avg_sq"]).flatten().split(BLOCK)
    squares: list[Tensor] = []
    for first, second in zip(first_moments, second_moments, strict=True):
        squares.append(_square(first / (second / bias).sqrt_().add_(group["eps"])))
    return torch.stack(squares).sum() * scale.square()


def _square(t: Tensor) -> Tensor:
    """Σ x² in float64, 0-d. In float32 single values of 1e19 would overflow."""
    # 0-d each
    norms = [block.float().norm(dtype=torch.float64) for block in t.flatten().split(BLOCK)]
    return torch.stack(norms).square().sum()


def local_shard(t: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, detached; the whole of a plain tensor."""
    if isinstance(t, DTensor):
        t = t.to_local()
    return t.detach()


def _share_of_ranks(t: Tensor) -> float:
    """1 / (number of ranks that hold the same values), so that a replicated parameter counts once in a sum over
    ranks."""
    shards = 1
    if isinstance(t, DTensor):  # is_shard() is False for the strided shards of FSDP over TP
        shards = math.prod(
            t.device_mesh.size(i) for i, p in enumerate(t.placements) if not p.is_replicate()
        )
    return shards / dist.get_world_size()
