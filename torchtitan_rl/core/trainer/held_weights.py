"""What the optimizer holds of every weight, read from its own shards, so that a copy of it elsewhere can be proven."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.core.generator.weight_samples import Part, part_of
from torchtitan_rl.core.trainer.hf import exported_rows

HeldSample = tuple[str, Tensor | None, Tensor]
"""(Hugging Face name, which of its rows that are looked at this rank's shard has, None for all; their values, [rows * block], as
weight_samples.py says, in the dtype of the policy's own weights)"""


class _Shard(NamedTuple):
    name: str
    parameter: Tensor
    part: Part
    """What this rank has of the tensor of this name."""


class HeldWeights:
    """Reads shards: nothing is gathered, no rank waits for another, and what gathers for the engine is not used."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter) -> None:
        shards = [
            _shard(name, parameter, rows)
            for parameter, exported in exported_rows(model, adapter)
            for name, rows in exported.items()
        ]
        self.whole = {shard.name: shard.part for shard in shards if shard.part.is_whole}
        """The weights that this rank has all of, by name."""
        self._vectors = [(shard.name, shard.parameter) for shard in shards if shard.part.vector]
        others = [shard for shard in shards if not shard.part.vector]
        self._names, self._parameters, self._parts = zip(*others, strict=True)

    def samples(self, turn: int) -> Iterator[HeldSample]:
        """This rank's part of the samples of every weight."""
        vectors = ((name, None, _local(parameter)) for name, parameter in self._vectors)
        rows, elements = zip(*(part.look(turn) for part in self._parts), strict=True)
        # No Python between the looks: in it most of their time would go.
        samples = map(torch.take, map(_local, self._parameters), elements)
        return chain(vectors, zip(self._names, rows, samples, strict=True))


def _shard(name: str, parameter: Tensor, rows: Tensor) -> _Shard:
    """
    Args:
        rows: [rows of `name`] where in the parameter each of its rows is.
    """
    shape, offset = parameter.shape, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    local = rows - offset[0]  # [rows of `name`]
    mine = ((local >= 0) & (local < shape[0])).nonzero()[:, 0]
    columns = slice(offset[1], offset[1] + shape[1]) if parameter.ndim > 1 else slice(0, 1)
    width = parameter.shape[1] if parameter.ndim > 1 else 1
    device = parameter.device
    return _Shard(name, parameter, part_of(mine.to(device), len(rows), width, columns, local[mine].to(device)))


def _local(parameter: Tensor) -> Tensor:
    """Without the record for a gradient that `to_local` makes, which costs more than the look."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
