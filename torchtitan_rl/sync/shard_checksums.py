"""Checksums of the optimizer's own weight shards, to verify copies of them. They share no code with the gathering of weights."""

from collections.abc import Iterable, Mapping, Set
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl import comm
from torchtitan_rl.models.hf import exported_rows, local_shard
from torchtitan_rl.sync.checksum import checksums, place_weights


class _Shard(NamedTuple):
    """This rank's shard of a parameter that is exported under k names."""

    parameter: Tensor
    names: slice  # the k names' numbers in ShardChecksums.shapes
    weights: Tensor  # [k, rows of the shard], 0 for rows of other names; [1, rows] for k experts
    first: tuple[int, int]  # row and column
    scale: float


class ShardChecksums:
    """Checksums by Hugging Face name."""

    def __init__(
        self, exported: Iterable[tuple[Tensor, Mapping[str, Tensor]]], *, lora_scale: float = 1.0
    ) -> None:
        """
        Args:
            exported: `exported_rows` or `adapter_rows` of the policy.
            lora_scale: every adapter's B is multiplied by it, as in the engine.
        """
        self.shapes: dict[str, tuple[int, int]] = {}
        """(rows, columns) of each full tensor. A vector has one column; the [C, 1, K] of a depthwise convolution has C rows
        of K."""
        self._shards: list[_Shard] = []
        for parameter, rows_of_names in exported:
            self.device = parameter.device
            is_b = any(".lora_B." in name for name in rows_of_names)
            self._add(parameter, rows_of_names, lora_scale if is_b else 1.0)

    def _add(self, parameter: Tensor, rows_of_names: Mapping[str, Tensor], scale: float) -> None:
        """Add a parameter that is exported under these names, with its rows under each."""
        shard, offsets, shape = local_shard(parameter), [0] * parameter.ndim, parameter.shape
        if isinstance(parameter, DTensor) and (chunks := parameter.__create_chunk_list__()):
            offsets = list(chunks[0].offsets)
        if parameter.ndim == 3 and shape[1] == 1:  # a depthwise convolution's, [C, 1, K]
            shard, offsets, shape = shard.squeeze(1), offsets[::2], shape[::2]
        begin, num_names = len(self.shapes), len(rows_of_names)
        if len(shape) == 3:  # one matrix for each expert, all with the same places
            self.shapes |= dict.fromkeys(rows_of_names, tuple(shape[1:]))
            weights = place_weights(torch.arange(shape[1]))[None]  # [1, rows]
            begin, num_names = begin + offsets.pop(0), len(shard)
        else:
            weights = torch.zeros(num_names, len(parameter), dtype=torch.int64)
            for number, (name, rows) in enumerate(rows_of_names.items()):
                self.shapes[name] = (len(rows), *shape[1:], 1)[:2]
                weights[number, rows] = place_weights(torch.arange(len(rows)))
        first_row, first_column = (*offsets, 0)[:2]
        weights = weights[:, first_row : first_row + shard.shape[max(0, shard.ndim - 2)]]
        names, first = slice(begin, begin + num_names), (first_row, first_column)
        self._shards.append(_Shard(parameter, names, weights.to(self.device), first, scale))

    def checksums(self, dtype: torch.dtype, due: Set[int] | None = None) -> Tensor:
        """Returns this rank's part of each checksum in `dtype`, [names] int64. All ranks' parts sum to the full tensor's.

        Args:
            due: numbers of the names to sum, at least; None: all.
        """
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        for shard in self._shards:
            numbers = range(*shard.names.indices(len(sums)))
            if is_first_replica(shard.parameter) and (due is None or not due.isdisjoint(numbers)):
                sums[shard.names] = _sums(shard, dtype)
        return sums

    def drifted(self, dtype: torch.dtype) -> list[str]:
        """Returns a sentence for each tensor of which ranks hold unequal replicas. Collective."""
        shards: list[tuple[str, tuple[int, int], int, int]] = []
        for shard in self._shards:
            names = list(self.shapes)[shard.names]
            for name, total in zip(names, _sums(shard, dtype).tolist(), strict=True):
                shards.append((name, shard.first, dist.get_rank(), total))
        return unequal_replicas(comm.all_gather_lists(shards))


def _sums(shard: _Shard, dtype: torch.dtype) -> Tensor:
    """Returns the checksums of a shard as the engine has it, [k] int64."""
    values = local_shard(shard.parameter)
    if shard.scale != 1.0:
        values = values.to(dtype) * shard.scale
    return checksums(values, shard.weights, first_column=shard.first[1], dtype=dtype)


def is_first_replica(parameter: Tensor) -> bool:
    """Whether this rank holds the first of several replicas of its shard."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(
        index == 0 for index, placement in replicas if placement.is_replicate()
    )


def unequal_replicas(shards: Iterable[tuple[str, tuple[int, int], int, int]]) -> list[str]:
    """Returns a sentence for each tensor of which ranks hold the same part with other bits.

    Example: [("norm.weight", (0, 0), 0, 17), ("norm.weight", (0, 0), 1, 18)] -> ["norm.weight is not the same on ranks 0 and 1"]

    Args:
        shards: (name, first row and column, rank, checksum) of every rank's shards.
    """
    first: dict[tuple[str, tuple[int, int]], tuple[int, int]] = {}
    drifted: dict[str, str] = {}
    for name, place, rank, total in shards:
        other_rank, other_total = first.setdefault((name, place), (rank, total))
        if total != other_total:
            drifted.setdefault(name, f"{name} is not the same on ranks {other_rank} and {rank}")
    return list(drifted.values())


def base_digest(model: Decoder, adapter: BaseStateDictAdapter) -> str:
    """Returns a digest of all weights but adapters', the same for every sharding. Collective."""
    base = ShardChecksums(exported_rows(model, adapter))
    sums = base.checksums(torch.float32)
    dist.all_reduce(sums)
    rows = zip(base.shapes.items(), sums.tolist(), strict=True)
    named = sorted((name, *shape, total) for (name, shape), total in rows)
    return sha256(repr(named).encode()).hexdigest()[:16]
