"""Faults put into the product on purpose, to see that the rehearsal tells of each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_rl.trainer import packing
from torchtitan_rl.trainer import trainer as trainer_module
from torchtitan_rl.trainer.trainer import Trainer


@contextmanager
def _before(owner: object, name: str, extra: Callable) -> Iterator[None]:
    """Within this context `extra` is called with the arguments of `owner.name` before it."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: object, **kwargs: object) -> object:
        extra(*args)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _cpu_tensor(trainer: Trainer, *_: object) -> None:
    dist.all_reduce(torch.zeros(()), group=trainer.dp_group)


def _stream_race(parameters: list, *_: object) -> None:
    gradient = torch.empty(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        gradient.add_(1)
    del gradient  # the compute stream may now give this memory to its next operator
    torch.empty(1 << 20, device="cuda")


def _item_in_a_loop(trainer: Trainer, batch: object, *_: object) -> None:
    for length in batch.layout.lengths:
        length.item()


def _other_order(trainer: Trainer, *_: object) -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.zeros((), device="cuda"), group=trainer.dp_group)


def _memory(trainer: Trainer, *_: object) -> None:
    trainer.kept = torch.zeros(1 << 30, device="cuda")


@contextmanager
def _wrong_labels() -> Iterator[None]:
    original = packing._shifted

    def shifted(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return original(values + (packing.DEVICE_TYPE == "cuda" and values.dtype == np.int64), lengths)

    packing._shifted = shifted
    try:
        yield
    finally:
        packing._shifted = original


FAULTS: dict[str, Callable] = {
    "a CPU tensor in a collective": lambda: _before(Trainer, "_gradient", _cpu_tensor),
    "a stream race": lambda: _before(trainer_module, "clip_grad_norm_", _stream_race),
    "item() in a loop": lambda: _before(Trainer, "score", _item_in_a_loop),
    "another order of collectives": lambda: _before(Trainer, "_gradient", _other_order),
    "memory that is kept": lambda: _before(Trainer, "update", _memory),
    "labels of other values": _wrong_labels,
}
"""Name -> the context in which the product has the fault."""
