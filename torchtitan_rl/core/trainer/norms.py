"""How far one optimizer step went, against the size of the weights: norms over the whole sharded model."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_rl.core.device import DEVICE_TYPE

BLOCK = 2**20
"""Elements of a shard that are looked at together: what is computed from them stays in a CPU's last cache and is small on a GPU.
With smaller blocks, waking the CPU's threads takes as long as the work."""


@torch.no_grad()
def update_and_weight_norm(optimizer: OptimizersContainer) -> tuple[float, float]:
    """(‖last AdamW update without weight decay‖, ‖weights‖) over all parameters and ranks; the same on every rank. Collective.

    The update is made again from the optimizer's moments, so no copy of the weights is kept over the step. It is 0 for what has
    not been stepped yet. A weight that is NaN or infinite makes the second norm so.
    """
    squares = [
        torch.stack([_square_of_update(one.state[p], group), _square(_local(p))]) * _share_of_ranks(p)  # [2]
        for one in optimizer
        for group in one.param_groups
        for p in group["params"]
    ]
    total = torch.stack(squares).sum(0)  # [2]
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    update, weights = total.sqrt().tolist()
    return update, weights


def _square_of_update(state: dict[str, Tensor], group: dict) -> Tensor:
    """Σ (lr · m̂ / (√v̂ + eps))² of this rank's shard; Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. Zero before any step."""
    if not state:
        return torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)
    step, (beta1, beta2) = state["step"].double(), group["betas"]  # left on its device: no wait for each parameter
    scale, bias = group["lr"] / (1 - beta1**step), 1 - beta2**step
    blocks = zip(*(_local(state[name]).flatten().split(BLOCK) for name in ("exp_avg", "exp_avg_sq")), strict=True)
    squares = [_square(first / (second / bias).sqrt_().add_(group["eps"])) for first, second in blocks]
    return torch.stack(squares).sum() * scale.square()


def _square(t: Tensor) -> Tensor:
    """Σ x² as float64, 0-d: float32 would overflow where single values reach 1e19."""
    return torch.stack([block.float().norm(dtype=torch.float64) for block in t.flatten().split(BLOCK)]).square().sum()


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _share_of_ranks(t: Tensor) -> float:
    """One over the number of ranks that hold the same values: a replicated parameter must count once in a sum over ranks."""
    shards = 1
    if isinstance(t, DTensor):  # is_shard() is False for the strided shards of FSDP over TP
        shards = math.prod(t.device_mesh.size(i) for i, p in enumerate(t.placements) if not p.is_replicate())
    return shards / dist.get_world_size()
