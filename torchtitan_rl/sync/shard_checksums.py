"""Checksums of the optimizer's own weight shards, to verify copies of them. They share no code with the gathering of weights."""

from collections.abc import Iterable, Mapping, Set
from functools import partial
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl import comm
from torchtitan_rl.models.hf import exported_rows, local_shard
from torchtitan_rl.sync.checksum import Matrices, place_weights, sums_of


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
        self._shards: dict[tuple, Matrices] = {}
        """(whether this rank has the first replica, first row and column, ...) -> shards that are summed together."""
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
        if not shard.numel():  # more ranks than rows: as of an adapter's A
            return
        first_row, first_column = (*offsets, 0)[:2]
        weights = weights[:, first_row : first_row + shard.shape[max(0, shard.ndim - 2)]]
        first, alike = (first_row, first_column), (shard.shape, scale, weights.numpy().tobytes())
        new = Matrices(weights.to(self.device), first_column, scale, [], [])
        shards = self._shards.setdefault((is_first_replica(parameter), first, *alike), new)
        shards.reads.append(partial(local_shard, parameter))
        shards.numbers.extend(range(begin, begin + num_names))

    def checksums(self, dtype: torch.dtype, due: Set[int] | None = None) -> Tensor:
        """Returns this rank's part of each checksum in `dtype`, [names] int64. All ranks' parts sum to the full tensor's.

        Args:
            due: numbers of the names to sum, at least; None: all.
        """
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        mine = [shards for (is_first, *_), shards in self._shards.items() if is_first]
        mine = [shards for shards in mine if due is None or not due.isdisjoint(shards.numbers)]
        return sums_of(mine, sums, dtype)

    def drifted(self, dtype: torch.dtype) -> list[str]:
        """Returns a sentence for each tensor of which two ranks hold the same part with other bits. Collective."""
        names, mine = list(self.shapes), []
        for (_, first, *_), shards in self._shards.items():
            for number, total in zip(shards.numbers, shards.checksums(dtype).tolist(), strict=True):
                mine.append((names[number], first, dist.get_rank(), total))
        seen: dict[tuple[str, tuple[int, int]], tuple[int, int]] = {}
        drifted: dict[str, str] = {}
        for name, first, rank, total in comm.all_gather_lists(mine):
            other_rank, other_total = seen.setdefault((name, first), (rank, total))
            if total != other_total:
                drifted[name] = f"{name} is not the same on ranks {other_rank} and {rank}"
        return list(drifted.values())


def is_first_replica(parameter: Tensor) -> bool:
    """Whether this rank holds the first of several replicas of its shard."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(
        index == 0 for index, placement in replicas if placement.is_replicate()
    )


def base_digest(model: Decoder, adapter: BaseStateDictAdapter) -> str:
    """Returns a digest of all weights but adapters', the same for every sharding. Collective."""
    base = ShardChecksums(exported_rows(model, adapter))
    sums = base.checksums(torch.float32)
    dist.all_reduce(sums)
    rows = zip(base.shapes.items(), sums.tolist(), strict=True)
    named = sorted((name, *shape, total) for (name, shape), total in rows)
    return sha256(repr(named).encode()).hexdigest()[:16]
