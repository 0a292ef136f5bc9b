"""Norms of the last optimizer step and of the weights, over the whole sharded model."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU

BATCH = 2**20 if ON_CPU else 2**27
"""Elements that are measured at once. On a CPU their temporaries fit in the last-level cache; with fewer, waking the
CPU's threads takes as long as the work. On a GPU they take 1 GiB, and the fewer batches the fewer launches."""


class StepNorms:
    """Measures the last step of any optimizer."""

    def __init__(self, optimizer: OptimizersContainer) -> None:
        """During a step there is a copy of the weights whose update cannot be computed from Adam's moments."""
        self._optimizer = optimizer
        self._before: dict[Tensor, Tensor] = {}
        self._squares: dict[Tensor, Tensor] = {}
        for one in optimizer:
            if not _is_adam(one):
                one.register_step_pre_hook(self._copy_weights)
                one.register_step_post_hook(self._measure_change)

    @torch.no_grad()
    def _copy_weights(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._before[p] = local_shard(p).clone()

    @torch.no_grad()
    def _measure_change(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                before = self._before.pop(p)  # frees one copy at a time
                self._squares[p] = _sum_of_squares([local_shard(p) - before])

    @torch.no_grad()
    def update_and_weight_norm(self) -> tuple[float, float]:
        """Returns (‖last update‖, ‖weights‖), the same on every rank. Collective.

        The update of Adam and AdamW is without weight decay, and recomputed from the moments, so that no copy of the
        weights is made. That of another optimizer is the whole change of the weights. It is 0 for a parameter that
        has not been updated. The second norm is NaN or infinite if any weight is.
        """
        update, weights = _zero(), _zero()  # 0-d each
        for optimizer in self._optimizer:
            for group in optimizer.param_groups:
                for share, params in _by_share(group["params"]).items():
                    weights += share * _sum_of_squares([local_shard(p) for p in params])
                    update += share * self._square_of_update(optimizer, group, params)
        total = torch.stack([update, weights])  # [2]
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        update, weights = total.sqrt().tolist()
        return update, weights

    def _square_of_update(self, optimizer: Optimizer, group: dict, params: list[Tensor]) -> Tensor:
        """Σ update² over this rank's shards of some parameters of a group, 0-d."""
        if _is_adam(optimizer):
            states = [optimizer.state[p] for p in params if optimizer.state.get(p)]
            return _square_of_adam(states, group)
        total = _zero()
        for p in params:
            if p in self._squares:
                total = total + self._squares[p]
        return total


def _is_adam(optimizer: Optimizer) -> bool:
    """Whether `_square_of_adam` is this optimizer's update. A subclass may compute another one."""
    return type(optimizer) in (Adam, AdamW) and not any(
        group["amsgrad"] for group in optimizer.param_groups
    )


def _square_of_adam(states: list[dict[str, Tensor]], group: dict) -> Tensor:
    """Σ (lr · m̂ / (√v̂ + eps))² over this rank's shards, 0-d.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.

    Args:
        states: of parameters that have taken equally many steps, because every step has a gradient of each.
    """
    if not states:
        return _zero()
    step = states[0]["step"].double()  # 0-d; stays on its device: no synchronization
    beta1, beta2 = group["betas"]
    scale = group["lr"] / (1 - beta1**step)
    bias = (1 - beta2**step).float().to(DEVICE_TYPE)
    first_moments = [local_shard(state["exp_avg"]) for state in states]
    second_moments = [local_shard(state["exp_avg_sq"]) for state in states]
    total = _zero()
    for first, second in _batches(first_moments, second_moments):
        divisor = torch._foreach_div(second, bias)
        torch._foreach_sqrt_(divisor)
        torch._foreach_add_(divisor, group["eps"])
        total += _square(torch._foreach_div(first, divisor))
    return total * scale.square()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Σ x² over all tensors, 0-d."""
    total = _zero()
    for [blocks] in _batches(tensors):
        total = total + _square(blocks)
    return total


def _square(blocks: list[Tensor]) -> Tensor:
    """Σ x² in float64, 0-d. In float32 single values of 1e19 would overflow."""
    norms = torch._foreach_norm(blocks, dtype=torch.float64)  # 0-d each
    return torch.stack(norms).square().sum()


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)


def _batches(*columns: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Divide tensors into blocks of at most BATCH elements, and these into batches of at most as many. Yields each
    batch's blocks of each column.

    Args:
        columns: lists of equally many tensors. Those at the same place have the same size.
    """
    batch: list[list[Tensor]] = [[] for _ in columns]
    elements = 0
    for tensors in zip(*columns, strict=True):
        in_blocks = [t.flatten().split(BATCH) for t in tensors]
        for blocks in zip(*in_blocks, strict=True):
            if elements and elements + blocks[0].numel() > BATCH:
                yield batch
                batch, elements = [[] for _ in columns], 0
            elements += blocks[0].numel()
            for column, block in zip(batch, blocks, strict=True):
                column.append(block)
    if batch[0]:
        yield batch


def local_shard(t: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, detached; the whole of a plain tensor."""
    if isinstance(t, DTensor):
        t = t.to_local()
    return t.detach()


def _by_share(params: list[Tensor]) -> dict[float, list[Tensor]]:
    """Returns the parameters by their `_share_of_ranks`."""
    found: dict[float, list[Tensor]] = {}
    for p in params:
        found.setdefault(_share_of_ranks(p), []).append(p)
    return found


def _share_of_ranks(t: Tensor) -> float:
    """1 / (number of ranks that hold the same values), so that a replicated parameter counts once in a sum over
    ranks."""
    shards = 1
    if isinstance(t, DTensor):  # is_shard() is False for the strided shards of FSDP over TP
        for dimension, placement in enumerate(t.placements):
            if not placement.is_replicate():
                shards *= t.device_mesh.size(dimension)
    return shards / dist.get_world_size()
