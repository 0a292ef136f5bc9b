"""Checksums of the optimizer's own weight shards, to verify copies of them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.core.trainer.hf import blocks_of, to_hf
from torchtitan_rl.core.trainer.lora import is_adapter
from torchtitan_rl.core.trainer.norms import local_shard
from torchtitan_rl.proof.checksum import checksums, place_weights


class _Shard(NamedTuple):
    """This rank's shard of a parameter that is exported under k names."""

    parameter: Tensor
    names: slice  # the k names' indices in HeldWeights.shapes
    weights: Tensor  # [k, rows of the shard], 0 for rows of other names
    first_column: int


class HeldWeights:
    """Reads the shards directly and shares no code with the gathering of weights for the engine."""

    def __init__(self, model: Decoder, adapter: BaseStateDictAdapter) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}
        """(rows, columns) of each full tensor by its Hugging Face name. A vector has one column."""
        self._shards: list[_Shard] = []
        for parameter, exported in self.exported(model, adapter):
            self.device = parameter.device
            begin, weights = len(self.shapes), torch.zeros(len(exported), len(parameter), dtype=torch.int64)
            for number, (name, rows) in enumerate(exported.items()):
                self.shapes[name] = (len(rows), *parameter.shape[1:], 1)[:2]
                weights[number, rows] = place_weights(torch.arange(len(rows)))
            if _counts(parameter):
                offsets = parameter.__create_chunk_list__()[0].offsets if isinstance(parameter, DTensor) else ()
                first_row, first_column = (*offsets, 0, 0)[:2]
                weights = weights[:, first_row : first_row + len(local_shard(parameter))].to(self.device)
                self._shards.append(_Shard(parameter, slice(begin, len(self.shapes)), weights, first_column))

    def exported(self, model: Decoder, adapter: BaseStateDictAdapter) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields the parameters to sum: see `exported_rows`."""
        return exported_rows(model, adapter)

    def values(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns this rank's shard as the engine has it, before it is cast to `dtype`."""
        return local_shard(parameter)

    def checksums(self, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of each checksum in `dtype`, [names] int64. All ranks' parts sum to the full tensor's."""
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        for parameter, names, weights, first_column in self._shards:
            sums[names] = checksums(self.values(parameter, dtype), weights, first_column=first_column, dtype=dtype)
        return sums


def _counts(parameter: Tensor) -> bool:
    """Whether this rank's shard is in the sum. Only the first of several replicas is."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    mesh = parameter.device_mesh
    replicas = zip(mesh.get_coordinate(), parameter.placements, strict=True)
    return 0 in mesh.mesh and all(index == 0 for index, placement in replicas if placement.is_replicate())


def exported_rows(model: Decoder, adapter: BaseStateDictAdapter) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields each parameter that `hf_weights` exports, with the rows of the parameter under each of its names.

    Example: (parameter, {"model.embed_tokens.weight": tensor([0, 1, ...]), "lm_head.weight": tensor([0, 1, ...])})
    """
    for prefix, block in blocks_of(model):
        for name, parameter in block.named_parameters():
            if not is_adapter(name):
                yield parameter, rows_of(model, adapter, prefix, block, name, parameter)


def rows_of(
    model: Decoder, adapter: BaseStateDictAdapter, prefix: str, block: nn.Module, name: str, parameter: Tensor
) -> dict[str, Tensor]:
    """Returns the rows of a block's parameter under each of its Hugging Face names."""
    rows = torch.arange(len(parameter)).reshape(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape)
    exported = dict(to_hf(model, adapter, prefix, block, {canonical_fqn(prefix + name): rows}))
    return {name: (rows if rows.ndim == 1 else rows[:, 0]) for name, rows in exported.items()}
