"""The link between trainers and generators, between real processes: two trainers and two generators."""

import math
import os
import socket
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

from torchtitan_rl import device  # noqa: F401  (before torchtitan, in the spawned processes)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.parts.stream import ListStream
from torchtitan_rl.generator_rank import GeneratorRank
from torchtitan_rl.link import Link, Order
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.sampler import FarSampler
from torchtitan_rl.types import Group, Prompt

SHAPES = [(3,), (2, 4), (), (5, 5), (7,), (1, 3), (0,), (200,), (2, 2)]
BLOCKS = [[0, 1, 2], [3], [], [4, 5, 6], [7], [8]]
TIMEOUT = timedelta(seconds=60)


def weights():
    """Named tensors."""
    for i, shape in enumerate(SHAPES):
        yield f"tensor {i}", torch.arange(i, i + math.prod(shape), dtype=torch.bfloat16).view(shape)


def freed_weights():
    """Blocks that lose their values as soon as the next one is read, as those that FSDP gathers."""
    tensors = list(weights())
    for numbers in BLOCKS:
        block = dict(tensors[number] for number in numbers)
        yield block
        for tensor in block.values():
            tensor.zero_()


class Rank(GeneratorRank):
    """With orders that show what arrives."""

    def double(self, array):
        array *= 2  # what arrives can be written into
        return array, dist.get_rank(), dist.get_world_size()

    def receive_weights(self):
        assert list(self._link.receive()) == []
        received = [pair for block in self._link.receive() for pair in block.items()]
        for (name, tensor), (expected, value) in zip(received, weights(), strict=True):
            assert (name, tensor.dtype, tensor.shape) == (expected, value.dtype, value.shape)
            assert torch.equal(tensor, value)

    def stop(self):
        self.observer.signals.append(15)  # as a signal to this rank alone would


class Samples:
    """In place of an engine: a step's groups and what it carries to the next say what was asked."""

    generator = None

    def __init__(self):
        self.step_sampler = SimpleNamespace(carried={})

    def training_groups(self, new, needed, round, *, state):
        first_counts_as_rank_0(state)
        texts = [*(carried.text for carried in self.step_sampler.carried.values()), *(prompt.text for prompt in new)]
        self.step_sampler.carried = {needed: question(f"carried by step {state.global_step}")}
        return [group(f"{text} in step {state.global_step}.{round}") for text in texts[:needed]]

    def held_out_groups(self, prompts, sampling, its_pass, *, state):
        first_counts_as_rank_0(state)
        return [group(f"{prompt.text} for {its_pass}") for prompt in prompts]


def first_counts_as_rank_0(state):
    """For reward functions, whichever rank of the job the first generator is."""
    assert state.is_world_process_zero == state.is_local_process_zero == (dist.get_rank() == 0)


def question(text):
    return Prompt(prompt_idx=0, text=text, token_ids=[1], expected_answer="")


def group(text):
    return Group(prompt=question(text), samples=[])


def texts(groups):
    return [group.prompt.text for group in groups]


def train_one_ahead(link):
    """Two steps of FarSampler with a group in flight; the groups of the second are sampled ahead."""
    recorded, stream = [], ListStream([question(f"prompt {i}") for i in range(9)])
    in_flight = SimpleNamespace(carried={5: question("carried by a checkpoint")})
    in_flight.num_new = lambda needed: needed + 1 - len(in_flight.carried)
    sampler = FarSampler(link, in_flight, ahead=True, record=recorded.append)
    state = partial(TrainerState, max_steps=9)
    new = sampler.draw(stream, 2)
    first = sampler.training_groups(new, 2, 1, state=state(global_step=1))
    assert texts(first) == ["carried by a checkpoint in step 1.1", "prompt 0 in step 1.1"]
    assert recorded == ["rank 0", "rank 1"]  # of each generator
    sampler.go_ahead(stream, 2, state=state(global_step=2))
    assert [carried.text for carried in in_flight.carried.values()] == ["carried by step 1"]
    sampler.arrive()
    sampler.arrive()  # nothing more has been begun
    assert [carried.text for carried in in_flight.carried.values()] == ["carried by step 2"]
    held_out = sampler.held_out_groups([question("held out")], None, "a pass", state=state())
    assert texts(held_out) == ["held out for a pass"]
    assert sampler.draw(stream, 2) == []
    second = sampler.training_groups([], 2, 0, state=state(global_step=2))
    assert texts(second) == ["carried by step 1 in step 2.0", "prompt 2 in step 2.0"]
    assert recorded == ["rank 0", "rank 1"] * 3


def join(rank, port):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4"
    )
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return Link(2, TIMEOUT)


def generate(link, rank):
    signals = []
    observer = SimpleNamespace(hand_over=lambda: f"rank {dist.get_rank()}", signals=signals if rank == 3 else [])
    generators = Rank(link, Samples(), None, observer, lambda: max(signals, default=0))
    assert generators.run() == 15
    assert generators.run() == 10


def train(link, rank):
    array = np.arange(3)
    doubled, first, size = link.call(1, "double", array=array)
    assert (doubled.tolist(), first, size, link.stopped) == ([0, 2, 4], 0, 2, 0)
    assert array.tolist() == [0, 1, 2]
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    link.order(Order(2, "receive_weights", {}))
    link.send(())
    link.send(freed_weights())
    link.answer()
    train_one_ahead(link)
    link.call(3, "stop")
    assert link.stopped == 15  # on every trainer, though only the last generator got the signal
    link.order(15)
    # A signal to trainers alone.
    FarSampler(link, SimpleNamespace(), ahead=True, record=None).close(10)


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
