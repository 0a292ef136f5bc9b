"""The link between trainers and generators, between real processes: two trainers and two generators."""

import math
import os
import socket
from datetime import timedelta

from torchtitan_rl import device  # noqa: F401  (before torchtitan, in the spawned processes)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_rl import link as link_module
from torchtitan_rl.generator_rank import GeneratorRank
from torchtitan_rl.link import Link, Order

SHAPES = [(3,), (2, 4), (), (5, 5), (7,), (1, 3), (0,), (200,), (2, 2)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32]
BUCKETS = [[0, 1, 2], [3], [4, 5, 6], [7], [8], []]
"""Of at most 100 bytes and one dtype, if no tensor alone is larger; the last ends the push."""
TIMEOUT = timedelta(seconds=20)


def weights():
    """Named tensors of two dtypes."""
    for i, shape in enumerate(SHAPES):
        values = torch.arange(i, i + math.prod(shape)).view(shape)
        yield f"tensor {i}", values.to(DTYPES[i % len(DTYPES)])


def freed_weights():
    """Tensors that lose their values as soon as the next one is read, as those of a block that FSDP gathers."""
    for name, tensor in weights():
        yield name, tensor
        tensor.zero_()


class ShownBuckets(Link):
    """Keeps what is sent together."""

    def _send(self, bucket):
        self.buckets.append([int(name.split()[1]) for name, _ in bucket])
        super()._send(bucket)


class Part:
    """What the generators carry out."""

    def __init__(self, link, signals):
        self._link, self._signals = link, signals

    def double(self, array):
        array *= 2  # what arrives can be written into
        return array, dist.get_rank(), dist.get_world_size()

    def receive(self):
        assert list(self._link.receive()) == []
        for (name, tensor), (expected, value) in zip(self._link.receive(), weights(), strict=True):
            assert (name, tensor.dtype, tensor.shape) == (expected, value.dtype, value.shape)
            assert torch.equal(tensor, value)

    def stop(self):
        self._signals.append(15)  # as a signal to this rank alone would


def join(rank, port):
    link_module.BUCKET_BYTES = 100
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="4")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    link = ShownBuckets(2, TIMEOUT)
    link.buckets = []
    return link


def generate(link, rank):
    signals = []
    parts = {"part": Part(link, signals if rank == 3 else [])}
    generators = GeneratorRank(link, parts, None, lambda: None, lambda: max(signals, default=0))
    assert generators.run() == 15


def train(link, rank):
    array = np.arange(3)
    doubled, first, size = link.call(1, "part", "double", array=array)
    assert (doubled.tolist(), first, size, link.stopped) == ([0, 2, 4], 0, 2, 0)
    assert array.tolist() == [0, 1, 2]
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    link.order(Order(2, "part", "receive", {}))
    link.send(())
    link.send(freed_weights())
    link.answer()
    assert link.buckets == ([[], *BUCKETS] if rank == 0 else [])
    link.call(3, "part", "stop")
    assert link.stopped == 15  # on every trainer, though only the last generator got the signal
    link.order(None)


def run(rank, port):
    link = join(rank, port)
    assert link.samples == (rank >= 2)
    (generate if link.samples else train)(link, rank)
    dist.destroy_process_group()


def test_orders_answers_weights_and_stop_signals_reach_the_other_side():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port,), nprocs=4)
