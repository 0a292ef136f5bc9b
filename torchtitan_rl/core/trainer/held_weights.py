"""Checksums of the weights that the optimizer holds, from its own shards, so that a copy of them elsewhere can be proven."""

from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.core.checksum import Share, checksums, row_weights
from torchtitan_rl.core.trainer.hf import exported_rows


class _Part(NamedTuple):
    """Columns of this rank's shard of one parameter, and the shares that they count in."""

    columns: slice
    """In the shard."""
    first_column: int
    """In the whole tensor."""
    places: Tensor
    """[k] where in the flattened [names, shares] each sum belongs."""
    weights: Tensor
    """[k, rows of the shard]"""


class HeldWeights:
    """Reads shards directly; the code that gathers weights for the engine is not used."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter) -> None:
        self._exports = list(exported_rows(model, adapter))
        self._plans: list[list[_Part]] | None = None
        self.device = self._exports[0][0].device
        self.shapes = {
            name: (len(rows), *parameter.shape[1:], 1)[:2]
            for parameter, exported in self._exports
            for name, rows in exported.items()
        }
        """(rows, columns) of each whole tensor by its Hugging Face name; a vector has one column."""

    @torch.no_grad()
    def checksums(self, shares: dict[str, list[Share]], wanted: Container[str], dtype: torch.dtype) -> Tensor:
        """Checksums of each share of each tensor, [names, shares] int64; collective: one all-reduce if there are ranks.

        Args:
            shares: the same in every call, and equally many for each name.
            wanted: names to sum. The rows of the others are not to be used.
            dtype: of the copy; shards are cast as the sync casts them.
        """
        if self._plans is None:
            self._plans = [list(_plan(*export, shares)) for export in self._exports]
        sums = torch.zeros(sum(map(len, shares.values())), dtype=torch.int64, device=self.device)
        for (parameter, exported), parts in zip(self._exports, self._plans, strict=True):
            if any(name in wanted for name in exported):
                local = _local(parameter)
                for part in parts:
                    of_part = checksums(local[:, part.columns], part.weights, part.first_column, dtype)
                    sums.index_add_(0, part.places, of_part)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return sums.view(len(shares), -1)


def _plan(parameter: Tensor, exported: dict[str, Tensor], shares: dict[str, list[Share]]) -> Iterator[_Part]:
    """
    Args:
        exported: by name, the row of the parameter that each row of the tensor is, [rows].
    """
    if not _counts(parameter):
        return
    (first_row, first_column), (height, width) = (0, 0), _local(parameter).shape
    if isinstance(parameter, DTensor):
        first_row, first_column = (*parameter.__create_chunk_list__()[0].offsets, 0)[:2]
    order = {name: number for number, name in enumerate(shares)}
    found: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for name in exported.keys() & shares.keys():
        local = exported[name] - first_row  # [rows of the tensor]
        rows = torch.arange(len(local))
        mine = (local >= 0) & (local < height)
        for number, (share_rows, columns) in enumerate(shares[name]):
            taken = mine & (rows >= share_rows.start) & (rows < share_rows.stop)
            begin, end = max(first_column, columns.start), min(first_column + width, columns.stop)
            if begin < end and taken.any():
                weights = torch.zeros(height, dtype=torch.int64)
                weights[local[taken]] = row_weights(rows[taken])
                place = order[name] * len(shares[name]) + number
                found.setdefault((begin, end), []).append((place, weights))
    for (begin, end), sums in found.items():
        places, weights = zip(*sums, strict=True)
        columns = slice(begin - first_column, end - first_column)
        device = parameter.device
        yield _Part(columns, begin, torch.tensor(places, device=device), torch.stack(weights).to(device))


def _local(parameter: Tensor) -> Tensor:
    """This rank's shard, [rows, columns]; a vector has one column."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().view(len(local), -1) if local.numel() else local.detach().view(0, 1)


def _counts(parameter: Tensor) -> bool:
    """Whether this rank's shard goes into the sum: of equal replicas only the first one does."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(index == 0 for index, placement in replicas if placement.is_replicate())
