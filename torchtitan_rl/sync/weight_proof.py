"""Proof that a weight sync arrived: checksums of the policy's weights are compared with those of the engine's weights.

The policy's ranks sum the checksums of their shards of each Hugging Face tensor, and an engine's ranks those of their parts.
A GPU engine computes with its parameters. A CPU engine computes with packed copies, which are read back by multiplying them
with unit vectors.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_rl.checksum import checksums, place_weights
from torchtitan_rl.sync.expert_parts import ExpertPart, expert_parts, is_experts
from torchtitan_rl.sync.packed_order import convolution_order

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator
    from torchtitan_rl.generator.turn_engine import WideHead
    from torchtitan_rl.models.shard_checksums import ShardChecksums

UNITS = 64
"""Number of columns of a packed matrix that one product reads back."""

SIXTEENTHS = 16
"""Number of shares of the tensors. A push proves at least one of them, the next in turn."""

HEAD = "lm_head.weight"

NOT_SENT = "was not sent"
OTHER_VALUES = "arrived with other values than the policy holds"
CHANGED = "is a constant of the engine that has changed since its start"


class _Part(NamedTuple):
    """A parameter of this rank's engine. Its rows are this rank's shares of k Hugging Face tensors, concatenated."""

    layer: nn.Module
    parameter: str
    names: list[int]  # [k], the tensors' indices in ShardChecksums.shapes
    weights: Tensor  # [k, rows], 0 for rows of other tensors and for padding
    first_column: int
    packed_columns: int  # of the packed copy; 0 if there is none
    order: (
        Tensor | None
    )  # [rows * columns], the place of each element of a convolution's packed copy; None: not packed

    def matrices(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
        """Yields every copy of the parameter: ([rows, columns] or a vector [rows], index of the first column)."""
        if self.order is not None:
            unpacked = torch.empty(self.order.shape, dtype=dtype)
            unpacked[self.order] = getattr(self.layer, self.parameter).detach().flatten()
            yield unpacked.view(self.weights.shape[1], -1), 0
        elif len(tensor := getattr(self.layer, self.parameter)):
            yield tensor, self.first_column
        for begin in range(0, self.packed_columns, UNITS):
            units = torch.eye(
                min(UNITS, self.packed_columns - begin), self.packed_columns, dtype=dtype
            )
            product = self.layer.quant_method.apply(
                self.layer, units.roll(begin, 1)
            )  # [<= UNITS, rows]
            yield product.t(), self.first_column + begin


class WeightProof:
    """Compares the weights of this rank's engine with the policy's."""

    def __init__(
        self,
        model: nn.Module,
        *,
        policy_shards: "ShardChecksums",
        tp_size: int,
        dtype: torch.dtype,
        wide_head: "WideHead | None" = None,
    ) -> None:
        self._wide_head = wide_head
        self._model, self._policy_shards, self._tp_size, self._dtype = (
            model,
            policy_shards,
            tp_size,
            dtype,
        )
        self._replica, self._tp_rank = divmod(dist.get_rank(), tp_size)
        self._names = list(policy_shards.shapes)
        self._copies = torch.zeros(
            len(self._names), dtype=torch.int64, device=policy_shards.device
        )  # [names], copies in one engine
        self._parts: list[_Part | ExpertPart] = [
            self._part(*found) for found in self.parameters(model)
        ]
        for path, layer in model.named_modules():
            if is_experts(layer):
                self._parts += self._expert_parts(path, layer)
        # Buffers that are computed from the model's config.
        self._constants = {
            name: buffer.clone() for name, buffer in model.named_buffers() if "rotary" in name
        }

    @classmethod
    def of(cls, generator: "Generator", policy_shards: "ShardChecksums") -> "WeightProof":
        """Returns a proof for this rank's part of the engine. The engine's present constants count as correct."""
        proof = partial(
            cls,
            policy_shards=policy_shards,
            tp_size=generator.config.tensor_parallel_degree,
            dtype=generator.dtype,
            wide_head=generator.wide_head,
        )
        return generator.inspect(proof)

    def parameters(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, int], int]]:
        """Yields each parameter to compare: see `_parameters`."""
        return _parameters(model, self._policy_shards.shapes)

    def _part(self, layer: nn.Module, parameter: str, sizes: dict[str, int], width: int) -> _Part:
        """Derive this rank's share of each tensor from its local and its full size."""
        packed = parameter == "weight" and hasattr(layer, "cpu_linear")
        if self._wide_head and layer is self._wide_head.source:
            packed = False  # the engine computes with the wide copy of its matrix
        num_kept = packed + (
            len(getattr(layer, parameter)) > 0
        )  # an embedding keeps its matrix beside the packed copy
        numbers, weights = [self._names.index(name) for name in sizes], []
        for number, (name, size) in zip(numbers, sizes.items(), strict=True):
            whole_height, whole_width = self._policy_shards.shapes[name]
            first_row, row_copies = share_of(size, whole_height, self._tp_rank, self._tp_size)
            first_column, column_copies = share_of(width, whole_width, self._tp_rank, self._tp_size)
            places = torch.arange(
                first_row, first_row + size, device=self._policy_shards.device
            )  # [size]
            weights.append(place_weights(places) * (places < whole_height))
            self._copies[number] += num_kept * min(row_copies, column_copies)
        order = (
            convolution_order(sum(sizes.values()), width, self._dtype)
            if _packs_convolution(layer)
            else None
        )
        return _Part(
            layer,
            parameter,
            numbers,
            torch.block_diag(*weights),
            first_column,
            width if packed else 0,
            order,
        )

    def _expert_parts(self, path: str, layer: nn.Module) -> list[ExpertPart]:
        """Returns the parts of a layer of experts. Each rank has a share of every expert."""
        shapes = self._policy_shards.shapes
        parts = list(expert_parts(layer, path, shapes, rank=self._tp_rank, degree=self._tp_size))
        for part in parts:
            self._copies[part.names] += 1
        return parts

    def due(self, first: int, count: int) -> set[str]:
        """Returns the names to compare: `count` sixteenths of all tensors, from number `first` on, and the first and last layer.

        A push that is skipped, or breaks off, leaves the first or the last layer as it was.
        """
        layers = {
            name: int(found[1]) for name in self._names if (found := re.search(r"\.(\d+)\.", name))
        }
        ends = {min(layers.values(), default=0), max(layers.values(), default=0)}
        chosen = {(first + i) % SIXTEENTHS for i in range(count)}
        numbered = enumerate(self._names)
        due = {name for i, name in numbered if i * SIXTEENTHS // len(self._names) in chosen}
        return due | {name for name, layer in layers.items() if layer in ends}

    @torch.no_grad()
    def faults(
        self, sent: Collection[str] | None, *, due: Set[str] | None = None
    ) -> dict[str, str]:
        """Returns {name of the tensor: what is wrong} after a push. Collective.

        Args:
            sent: names of the tensors that were sent; None if an earlier push sent all.
            due: names of the tensors whose values are compared; None: all. The same on every rank.
        """
        due = set(self._names) if due is None else due
        numbers = {i for i, name in enumerate(self._names) if name in due}
        sums = self._sums(
            self._policy_shards.checksums(self._dtype, numbers), due=numbers
        )  # [policy and engines, names]
        differs = (sums[1:] != sums[0] * self._copies).any(0).tolist()
        wrong = {
            name: OTHER_VALUES
            for name, other in zip(self._names, differs, strict=True)
            if other and name in due
        }
        constants = (
            (name, self._model.get_buffer(name), start) for name, start in self._constants.items()
        )
        wrong |= {
            name: CHANGED for name, buffer, start in constants if not torch.equal(buffer, start)
        }
        if self._wide_head and not self._wide_head.is_current():
            wrong[HEAD] = OTHER_VALUES
        if sent is not None:
            copies = zip(self._names, self._copies.tolist(), strict=True)
            wrong |= {name: NOT_SENT for name, number in copies if number and name not in sent}
        return wrong

    def drifted(self) -> dict[str, str]:
        """Returns {name: what is wrong} for tensors of which the policy's ranks hold unequal replicas. Collective."""
        return self._policy_shards.drifted(self._dtype)

    def _sums(self, own: Tensor, *, due: Set[int]) -> Tensor:
        """Sums this rank's checksums of the policy's shards and of its engine's parts over the ranks: [1 + engines, names].

        Args:
            due: indices of the names to sum, at least.
        """
        sums = own.new_zeros(1 + dist.get_world_size() // self._tp_size, *own.shape)
        sums[0] = own
        for part in self._parts:
            if due.isdisjoint(part.names):
                continue
            for matrix, first_column in part.matrices(self._dtype):
                of_part = checksums(matrix.to(self._dtype), part.weights, first_column=first_column)
                sums[1 + self._replica, part.names] += of_part
        dist.all_reduce(sums)
        return sums


def share_of(size: int, full: int, rank: int, degree: int) -> tuple[int, int]:
    """Returns (start of a rank's share of a dimension, number of ranks with the same share) for its local and full size.

    Example: with 2 key heads on 4 ranks, rank 3 has a copy of the second head: size 64 of 128 -> (64, 2).
    """
    replicas = max(1, degree * min(size, full) // full)  # a vocabulary is padded at its end
    return rank // replicas * size, replicas


def _packs_convolution(layer: nn.Module) -> bool:
    """Whether a layer is a convolution whose weight vLLM has packed for a CPU."""
    return hasattr(layer, "_cpu_unpacked_conv_weight")


def _parameters(
    model: nn.Module, known: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[nn.Module, str, dict[str, int], int]]:
    """Yields each parameter of the engine: (layer, name in the layer, rows of each Hugging Face tensor in it, columns)."""
    fused = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        **getattr(model, "packed_modules_mapping", {}),
    }
    for path, layer in model.named_modules():
        if is_experts(layer):
            continue
        path = path.removesuffix(".base_layer")  # of a LoRA layer
        parent, _, last = path.rpartition(".")
        for parameter, tensor in layer.named_parameters(recurse=False):
            names = [
                ".".join(filter(None, (parent, name, parameter)))
                for name in fused.get(last, [last])
            ]
            names = (
                names if names[0] in known else [f"{path}.{parameter}"]
            )  # a matrix that Hugging Face merges too
            # vLLM drops a matrix after packing it, and packs a convolution's, so their shapes come from the layer.
            whole = len(tensor) > 0 and tensor.ndim < 3 and not _packs_convolution(layer)
            sizes = layer.output_partition_sizes if names[1:] or not whole else [len(tensor)]
            if len(sizes) != len(
                names
            ):  # a matrix of Hugging Face is several of vLLM's, on one rank
                sizes = [known[name][0] for name in names]
            width = (*tensor.shape, 1)[1]
            if not whole:  # a replicated layer has no part of its inputs
                width = getattr(layer, "input_size_per_partition", layer.input_size)
            yield layer, parameter, dict(zip(names, sizes, strict=True)), width
