"""Process groups and collectives over Python values. Tensors use torch's own collectives."""

import os
import pickle
import socket
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.config import CommConfig

from torchtitan_rl.device import DEVICE_TYPE

T = TypeVar("T")


def be_only_rank() -> None:
    """Make a process that torchrun has not started the only rank. Variables that are set stay as they are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(free_port)}.items():
        os.environ.setdefault(name, value)


def init_process_group(config: CommConfig) -> None:
    """Start NCCL for GPU tensors and gloo for Python values. On a CPU, gloo serves both."""
    from torchtitan.distributed.utils import init_distributed

    if DEVICE_TYPE == "cuda":
        from torchtitan.tools.utils import get_local_device

        torch.cuda.set_device(get_local_device())
    # Set by torchrun. torchtitan sets its own value and would warn about this one.
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    init_distributed(config, enable_cpu_backend=DEVICE_TYPE != "cpu")


def all_gather_lists(mine: list[T]) -> list[T]:
    """Returns all ranks' lists, concatenated in rank order, on every rank.

    All items are copies, this rank's own too, and on a single rank as well: code that writes into
    an array behaves the same on any number of ranks. Arrays inside the items are sent as raw
    buffers and arrive as writable views of the received bytes, unless they were sent read-only.
    """
    buffers: list[pickle.PickleBuffer] = []
    skeleton = pickle.dumps(mine, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(skeleton, dtype=np.uint8)]  # [bytes] each
    for buffer in buffers:
        parts.append(np.frombuffer(buffer.raw(), dtype=np.uint8))
    lengths: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lengths, [len(part) for part in parts])
    # [bytes] of each rank
    rows = [torch.empty(sum(of_rank), dtype=torch.uint8) for of_rank in lengths]
    np.concatenate(parts, out=rows[dist.get_rank()].numpy())
    # Broadcasts send exactly these bytes. gloo's all_gather pads to the longest list and makes two more copies.
    sent: list[dist.Work] = []
    for rank, row in enumerate(rows):
        sent.append(dist.broadcast(row, src=rank, async_op=True))
    for work in sent:
        work.wait()
    everyones: list[T] = []
    for row, of_rank in zip(rows, lengths, strict=True):
        skeleton, *buffers = (part.numpy() for part in row.split(of_rank))
        everyones += pickle.loads(skeleton, buffers=buffers)
    return everyones


def broadcast(value: T) -> T:
    """Returns rank 0's value on every rank."""
    holder = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]


def largest(number: int) -> int:
    """Returns the maximum over all ranks, on every rank."""
    if dist.get_world_size() == 1:
        return number
    numbers = torch.tensor(float(number))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers)


def is_rank_0() -> bool:
    """Whether this is the job's rank 0, which writes everything that is written once per run."""
    return os.environ.get("RANK", "0") == "0"


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def close_process_group() -> None:
    """Destroy the process groups, unless vLLM's shutdown has already done so."""
    if dist.is_initialized():
        dist.destroy_process_group()
