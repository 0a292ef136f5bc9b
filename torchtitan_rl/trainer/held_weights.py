"""What the optimizer holds of every weight, read from its own shards, so that a copy of it elsewhere can be proven."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.trainer.hf import exported_rows
from torchtitan_rl.weight_samples import sampled


class HeldSample(NamedTuple):
    """Some elements of this rank's shard of a weight."""

    name: str
    """Hugging Face's."""
    rows: slice | Tensor
    """Which rows of that tensor they are."""
    columns: slice
    """Which of its sampled columns (see weight_samples.py)."""
    values: Tensor
    """[rows, columns]"""


@dataclass(frozen=True)
class _Shard:
    name: str
    parameter: Tensor
    local_rows: slice | Tensor
    """This rank's rows of the parameter that belong to the tensor of this name."""
    rows: slice | Tensor
    """Where they are in it."""
    begin: int
    """The first column of this rank."""


class HeldWeights:
    """Reads shards: nothing is gathered, no rank waits for another, and what gathers for the engine is not used."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter) -> None:
        self._shards = [
            _shard(name, parameter, rows)
            for parameter, exported in exported_rows(model, adapter)
            for name, rows in exported.items()
        ]

    @torch.no_grad()
    def samples(self, turn: int, dtype: torch.dtype) -> Iterator[HeldSample]:
        """This rank's part of the samples of every weight, as the engine should have them: in `dtype`."""
        for shard in self._shards:
            local = _matrix(_local(shard.parameter))  # [local rows, local width]
            width = shard.parameter.shape[1] if shard.parameter.ndim > 1 else 1
            where, columns = sampled(width, turn, shard.begin, shard.begin + local.shape[1])
            yield HeldSample(shard.name, shard.rows, columns, local[shard.local_rows, where].to(dtype))


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
    begin = offset[1] if parameter.ndim > 1 else 0
    if torch.equal(rows, torch.arange(len(parameter))):  # slices make no copies
        return _Shard(name, parameter, slice(None), slice(offset[0], offset[0] + shape[0]), begin)
    device = parameter.device
    return _Shard(name, parameter, local[mine].to(device), mine.to(device), begin)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, width]; a vector's width is 1."""
    return tensor if tensor.ndim > 1 else tensor[:, None]
