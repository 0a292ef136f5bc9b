"""A job in which the last ranks only sample: two default process groups, and the messages between them.

The trainers' rank 0 gives orders, the generators carry them out together, and their first rank answers to all. Each side's own
collectives, FSDP's and the engine's, are those of its default group.
"""

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.events import waiting

LONGEST_WAIT = timedelta(days=1)
"""For the other side's step. It may take any time: a rank that hangs in it is its node's watchdog's to end."""


class Order(NamedTuple):
    """A call of a `GeneratorRank`'s method."""

    step: int
    method: str
    arguments: dict[str, Any]


class Link:
    """This rank's end of the link between trainers and generators."""

    def __init__(self, num_generators: int, timeout: timedelta) -> None:
        """Split the job's default group: the last `num_generators` ranks sample. Collective for the whole job."""
        rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
        self._first = first = size - num_generators  # the generators' first rank
        self.samples = rank >= first
        dist.destroy_process_group()
        store, _, _ = next(dist.rendezvous("env://"))
        here = range(first, size) if self.samples else range(first)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("generators" if self.samples else "trainers", store),
            rank=here.index(rank),
            world_size=len(here),
            timeout=timeout,
        )
        # No groups of torch.distributed, whose ranks are those of a default group.
        words, weights = (dist.PrefixStore(name, store) for name in ("orders", "weights"))
        self._words = c10d.ProcessGroupGloo(words, rank, size, timeout=LONGEST_WAIT)
        self.stopped = 0
        """The signal that asks the job to end and has reached a generator's rank, 0 for none: the same on every rank."""
        self._weights = None
        if rank == 0 or self.samples:
            place = max(0, rank - first + 1)  # rank 0 sends
            group = c10d.ProcessGroupGloo if DEVICE_TYPE == "cpu" else c10d.ProcessGroupNCCL
            self._weights = group(weights, place, num_generators + 1, timeout=timeout)

    def order(self, order: Order | int = 0) -> Order | int:
        """Returns the trainers' order on every rank of the job, which rank 0 gives. The last one is the number of the signal that has
        ended training, or 0."""
        with waiting("idle_generator") if self.samples else nullcontext():
            return _broadcast(self._words, order, 0, "cpu")

    def answer(self, value: Any = None, stopped: int = 0) -> Any:
        """Returns the generators' answer on every rank of the job, which their first rank gives, with `stopped`."""
        with nullcontext() if self.samples else waiting("idle_trainer"):
            value, self.stopped = _broadcast(self._words, (value, stopped), self._first, "cpu")
        return value

    def call(self, step: int, method: str, **arguments: Any) -> Any:
        """Give an order and wait for the answer. On the trainers."""
        self.order(Order(step, method, arguments))
        return self.answer()

    def send(self, blocks: Iterable[Mapping[str, Tensor]]) -> None:
        """Send blocks of named tensors of one dtype to every generator. Every trainer calls it, as the iterator may be collective;
        rank 0 sends."""
        sends = self._weights is not None
        for block in blocks:
            if sends and block:
                flat = torch.cat(
                    [tensor.detach().flatten() for tensor in block.values()]
                )  # [elements]
                shapes = {name: tensor.shape for name, tensor in block.items()}
                _broadcast(self._weights, (shapes, flat.dtype), 0, DEVICE_TYPE)
                self._weights.broadcast(flat, 0).wait()
        if sends:
            _broadcast(self._weights, None, 0, DEVICE_TYPE)

    def receive(self) -> Iterator[dict[str, Tensor]]:
        """Yields the blocks that `send` sends. On the generators."""
        while block := _broadcast(self._weights, None, 0, DEVICE_TYPE):
            shapes, dtype = block
            sizes = [math.prod(shape) for shape in shapes.values()]
            flat = torch.empty(sum(sizes), dtype=dtype, device=DEVICE_TYPE)  # [elements]
            self._weights.broadcast(flat, 0).wait()
            parts = zip(shapes.items(), flat.split(sizes), strict=True)
            yield {name: part.view(shape) for (name, shape), part in parts}


def _broadcast(group: Any, value: Any, root: int, device: str) -> Any:
    """Returns the root's value, pickled on the way, on every rank of a group."""
    is_root = group.rank() == root
    data = pickle.dumps(value, protocol=5) if is_root else b""
    length = torch.tensor([len(data)], device=device)  # [1]
    group.broadcast(length, root).wait()
    row = bytearray(data if is_root else int(length))
    row = torch.frombuffer(row, dtype=torch.uint8).to(device)  # [bytes]
    group.broadcast(row, root).wait()
    return value if is_root else pickle.loads(row.cpu().numpy())
