"""Checksums of the optimizer's own weight shards, to verify copies of them."""

from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.core.checksum import checksums, moments, place_weights
from torchtitan_rl.core.trainer.hf import exported_rows
from torchtitan_rl.core.trainer.lora import is_adapter
from torchtitan_rl.core.trainer.norms import local_shard


class _Shard(NamedTuple):
    """This rank's shard of a parameter that is exported under k names."""

    parameter: Tensor
    names: slice  # the k names' indices in HeldWeights.shapes
    weights: Tensor  # [k, rows of the shard], 0 for rows of other names
    first_column: int
    scale: float  # of the engine's copy: an adapter's B is multiplied by alpha / rank there


class HeldWeights:
    """Reads the shards directly and shares no code with the gathering of weights for the engine."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter, *, lora_scale: float = 1.0) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}
        """(rows, columns) of each full tensor by its Hugging Face name. A vector has one column."""
        self._shards: list[_Shard] = []
        for parameter, exported in exported_rows(model, adapter):
            self.device = parameter.device
            begin, weights = len(self.shapes), torch.zeros(len(exported), len(parameter), dtype=torch.int64)
            for number, (name, rows) in enumerate(exported.items()):
                self.shapes[name] = (len(rows), *parameter.shape[1:], 1)[:2]
                weights[number, rows] = place_weights(torch.arange(len(rows)))
            if _counts(parameter):
                offsets = parameter.__create_chunk_list__()[0].offsets if isinstance(parameter, DTensor) else ()
                first_row, first_column = (*offsets, 0, 0)[:2]
                weights = weights[:, first_row : first_row + len(local_shard(parameter))].to(self.device)
                scale = lora_scale if any(".lora_B." in name for name in exported) else 1.0
                self._shards.append(_Shard(parameter, slice(begin, len(self.shapes)), weights, first_column, scale))

    def checksums(self, dtype: torch.dtype, *, adapters_only: bool = False) -> Tensor:
        """Returns this rank's part of each checksum in `dtype`, [names] int64. All ranks' parts sum to the full tensor's."""
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        for held, names, weights, first_column in self._held(dtype, adapters_only):
            sums[names] = checksums(held, weights, first_column=first_column, dtype=dtype)
        return sums

    def moments(self, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of `checksum.moments` of the adapters, [names, 2] float64; 0 for the base."""
        found = torch.zeros(len(self.shapes), 2, dtype=torch.float64, device=self.device)
        for held, names, weights, first_column in self._held(dtype, adapters_only=True):
            found[names] = moments(held.to(dtype), weights, first_column=first_column)
        return found

    def _held(self, dtype: torch.dtype, adapters_only: bool) -> Iterator[tuple[Tensor, slice, Tensor, int]]:
        for parameter, names, weights, first_column, scale in self._shards:
            if not adapters_only or parameter.requires_grad:
                held = local_shard(parameter)
                yield held if scale == 1 else held.to(dtype) * scale, names, weights, first_column

    def base_digest(self) -> str:
        """Returns a digest of the frozen weights, the same for every sharding; "" if none is frozen. Collective."""
        if not any(map(is_adapter, self.shapes)):
            return ""
        sums = self.checksums(torch.float32)
        dist.all_reduce(sums)
        held = sorted((name, *self.shapes[name], total) for name, total in zip(self.shapes, sums.tolist(), strict=True))
        return sha256(repr([one for one in held if not is_adapter(one[0])]).encode()).hexdigest()[:16]


def _counts(parameter: Tensor) -> bool:
    """Whether this rank's shard is in the sum. Only the first of several replicas is."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(index == 0 for index, placement in replicas if placement.is_replicate())
