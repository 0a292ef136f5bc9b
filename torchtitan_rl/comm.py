"""The few collectives over small Python values. Everything else is sharded tensors and goes through torch."""

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import init_distributed

from torchtitan_rl.device import DEVICE_TYPE, ON_CPU

T = TypeVar("T")


def init_process_group(config: CommConfig) -> None:
    """NCCL for GPU tensors with gloo beside it for small Python values; gloo alone on a CPU."""
    if not ON_CPU:
        from torchtitan.tools.utils import get_local_device

        torch.cuda.set_device(get_local_device())
    os.environ.pop(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", None
    )  # torchrun's; torchtitan sets its own and warns of the clash
    init_distributed(config, enable_cpu_backend=DEVICE_TYPE != "cpu")


def all_gather_lists(mine: list[T]) -> list[T]:
    """Every rank's list, concatenated in rank order, on every rank."""
    if dist.get_world_size() == 1:
        return mine
    shares: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, mine)
    return [item for share in shares for item in share]


def gather(value: Any) -> list[Any] | None:
    """Every rank's value on rank 0, None elsewhere."""
    if dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def broadcast(value: T) -> T:
    """Rank 0's value on every rank."""
    holder = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank, on every rank."""
    if dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def close_process_group() -> None:
    """End distributed work; vLLM's shutdown may already have done it."""
    if dist.is_initialized():
        dist.destroy_process_group()
