"""Checksums of the optimizer's own weight shards, to verify copies of them."""

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl import comm
from torchtitan_rl.checksum import checksums, place_weights
from torchtitan_rl.fields.lora_config import is_adapter
from torchtitan_rl.models.hf import blocks_of, local_shard, to_hf


class _Shard(NamedTuple):
    """This rank's shard of a parameter that is exported under k names."""

    parameter: Tensor
    names: slice  # the k names' indices in ShardChecksums.shapes
    weights: Tensor  # [k, rows of the shard], 0 for rows of other names; [1, rows] for the shards of k experts
    first_column: int
    first_row: int
    counts: bool
    """Whether it is in the sum. Only the first of several replicas is."""


class ShardChecksums:
    """Reads the shards directly and shares no code with the gathering of weights for the engine."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}
        """(rows, columns) of each full tensor by its Hugging Face name. A vector has one column; the [C, 1, K] of a depthwise
        convolution has C rows of K."""
        self._shards: list[_Shard] = []
        for parameter, exported in self.exported(model, adapter):
            self.device = parameter.device
            own, begin, offsets = local_shard(parameter), len(self.shapes), [0] * parameter.ndim
            if isinstance(parameter, DTensor) and (chunks := parameter.__create_chunk_list__()):
                offsets = list(chunks[0].offsets)
            shape = parameter.shape
            if is_depthwise(parameter):
                shape, offsets, own = shape[::2], offsets[::2], own.squeeze(1)
            names = slice(begin, begin + len(exported))
            if len(shape) == 3:  # one matrix for each expert, all with the same places
                self.shapes |= dict.fromkeys(exported, tuple(shape[1:]))
                weights = place_weights(torch.arange(shape[1]))[None]  # [1, rows]
                first_expert = offsets.pop(0)
                names = slice(begin + first_expert, begin + first_expert + len(own))
            else:
                weights = torch.zeros(len(exported), len(parameter), dtype=torch.int64)
                for number, (name, rows) in enumerate(exported.items()):
                    self.shapes[name] = (len(rows), *shape[1:], 1)[:2]
                    weights[number, rows] = place_weights(torch.arange(len(rows)))
            first_row, first_column = (*offsets, 0)[:2]
            weights = weights[:, first_row : first_row + own.shape[max(0, own.ndim - 2)]].to(
                self.device
            )
            self._shards.append(
                _Shard(parameter, names, weights, first_column, first_row, _counts(parameter))
            )

    def exported(
        self, model: Decoder, adapter: BaseStateDictAdapter
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields the parameters to sum: see `exported_rows`."""
        return exported_rows(model, adapter)

    def values(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns this rank's shard as the engine has it, before it is cast to `dtype`."""
        return local_shard(parameter)

    def checksums(self, dtype: torch.dtype, due: Set[int] | None = None) -> Tensor:
        """Returns this rank's part of each checksum in `dtype`, [names] int64. All ranks' parts sum to the full tensor's.

        Args:
            due: indices of the names to sum, at least; None: all.
        """
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        for shard in self._shards:
            if shard.counts and (
                due is None or not due.isdisjoint(range(*shard.names.indices(len(self.shapes))))
            ):
                sums[shard.names] = self._sums_of(shard, dtype)
        return sums

    def drifted(self, dtype: torch.dtype) -> dict[str, str]:
        """Returns the names of tensors of which ranks hold unequal replicas, and what is wrong with each. Collective."""
        mine = []
        for shard in self._shards:
            names = list(self.shapes)[shard.names]
            for name, total in zip(names, self._sums_of(shard, dtype).tolist(), strict=True):
                mine.append((name, (shard.first_row, shard.first_column), dist.get_rank(), total))
        return unequal_replicas(comm.all_gather_lists(mine))

    def _sums_of(self, shard: _Shard, dtype: torch.dtype) -> Tensor:
        values = self.values(shard.parameter, dtype)
        return checksums(values, shard.weights, first_column=shard.first_column, dtype=dtype)  # [k]


def unequal_replicas(shards: Iterable[tuple[str, tuple[int, int], int, int]]) -> dict[str, str]:
    """Returns {name: fault} for tensors of which ranks hold the same part with other bits.

    Example: [("norm.weight", (0, 0), 0, 17), ("norm.weight", (0, 0), 1, 18)] -> {"norm.weight": "is not the same on ranks 0 and 1"}

    Args:
        shards: (name, first row and column, rank, checksum) of every rank's shards.
    """
    first: dict[tuple[str, tuple[int, int]], tuple[int, int]] = {}
    wrong: dict[str, str] = {}
    for name, place, rank, total in shards:
        other_rank, other_total = first.setdefault((name, place), (rank, total))
        if total != other_total:
            wrong.setdefault(name, f"is not the same on ranks {other_rank} and {rank}")
    return wrong


def is_depthwise(weight: Tensor) -> bool:
    """Whether a weight is a depthwise convolution's, [C, 1, K]."""
    return weight.ndim == 3 and weight.shape[1] == 1


def _counts(parameter: Tensor) -> bool:
    """Whether this rank's shard is in the sum. Only the first of several replicas is."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(
        index == 0 for index, placement in replicas if placement.is_replicate()
    )


def exported_rows(
    model: Decoder, adapter: BaseStateDictAdapter
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields each parameter that `hf_weights` exports, with the rows of the parameter under each of its names.

    Example: (parameter, {"model.embed_tokens.weight": tensor([0, 1, ...]), "lm_head.weight": tensor([0, 1, ...])})
    """
    for prefix, block in blocks_of(model):
        for name, parameter in block.named_parameters():
            if not is_adapter(name):
                yield parameter, rows_of(model, adapter, prefix, block, name, parameter)


def rows_of(
    model: Decoder,
    adapter: BaseStateDictAdapter,
    prefix: str,
    block: nn.Module,
    name: str,
    parameter: Tensor,
) -> dict[str, Tensor]:
    """Returns the rows of a block's parameter under each of its Hugging Face names."""
    rows = (
        torch.arange(len(parameter))
        .reshape(-1, *[1] * (parameter.ndim - 1))
        .expand(parameter.shape)
    )
    exported = dict(to_hf(model, adapter, prefix, block, {canonical_fqn(prefix + name): rows}))
    return {
        name: rows.flatten(1)[:, 0] if rows.ndim > 1 else rows for name, rows in exported.items()
    }
