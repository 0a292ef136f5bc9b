"""The matrices that this rank's engine computes with, and their checksums, under Hugging Face's names.

A GPU engine computes with its parameters. A CPU engine packs each matrix when it is loaded and drops most originals, so a
packed matrix is unpacked to be compared.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_rl.generator.patches import (
    adapted_layers,
    adapter_buffers,
    experts_isa,
    pack_convolution,
    pack_experts,
)
from torchtitan_rl.sync.checksum import INTEGERS, Matrices, as_rows, place_weights, sums_of

Shapes = Mapping[str, tuple[int, int]]
"""(rows, columns) of each full tensor by its name: see `ShardChecksums.shapes`."""

EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""vLLM's parameters of a layer's experts, [E, 2 F, D] and [E, D, F], and each expert's matrices, one above the other."""


class _Share(NamedTuple):
    """Where this rank has its share of a tensor."""

    read: Callable[[], Tensor]
    """Its matrix [rows, columns], a vector [rows], or experts [E, rows, columns]."""
    top: int  # the share's first row there
    rows: slice  # of the tensor, without padding
    columns: slice


class EngineWeights:
    """The matrices that `find_base` or `find_adapter` has added."""

    def __init__(
        self, shapes: Shapes, *, rank: int, degree: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            rank, degree: this rank's place among the ranks of the engine, and their number.
            dtype, device: of the engine's weights.
        """
        self.shapes, self.rank, self.degree = shapes, rank, degree
        self.dtype, self.device = dtype, device
        self.numbers = {name: number for number, name in enumerate(shapes)}
        self._shares: list[list[_Share]] = [[] for _ in shapes]
        self._groups: dict[tuple, Matrices] = {}
        self._copies = {packed: [0] * len(shapes) for packed in (False, True)}

    def add(
        self,
        read: Callable[[], Tensor],
        heights: Mapping[str, int],
        width: int,
        *,
        is_packed: bool = False,
    ) -> None:
        """Add a matrix [rows, width] with `heights` rows of each tensor. Which rows these are follows from its full size."""
        shares, copies, weights, top = {}, [], [], 0
        for name, height in heights.items():
            rows, columns = self.shapes[name]
            first_row, row_copies = share_of(height, rows, self.rank, self.degree)
            first_column, column_copies = share_of(width, columns, self.rank, self.degree)
            places = torch.arange(first_row, first_row + height)  # [height]
            own = slice(first_row, min(first_row + height, rows))
            shares[name] = _Share(read, top, own, slice(first_column, first_column + width))
            copies.append(min(row_copies, column_copies))
            weights.append(place_weights(places) * (places < rows))
            top += height
        self.put(shares, copies, torch.block_diag(*weights), is_packed=is_packed)

    def put(
        self, shares: Mapping[str, _Share], copies: list[int], weights: Tensor, *, is_packed: bool
    ) -> None:
        """Add a matrix with shares of k tensors. `copies` of the engine's ranks hold the same share. `weights`: [k, rows], 0 for rows of
        other tensors and for padding; of experts [1, rows]."""
        numbers = [self.numbers[name] for name in shares]
        for share, number, same in zip(shares.values(), numbers, copies, strict=True):
            self._shares[number].append(share)
            self._copies[True][number] += same
            self._copies[False][number] += 0 if is_packed else same
        alone = len(self._groups) if is_packed else None  # unpacked one at a time
        begin, end = share.columns.start, share.columns.stop
        kind = alone, begin, end, len(numbers), weights.numpy().tobytes()
        new = Matrices(weights.to(self.device), begin, 1.0, [], [])
        group = self._groups.setdefault(kind, new)
        group.reads.append(share.read)
        group.numbers.extend(numbers)

    def copies(self, *, packed: bool) -> Tensor:
        """Returns how many copies of each tensor the ranks of an engine compare, [names] int64."""
        return torch.tensor(self._copies[packed], device=self.device)

    @torch.no_grad()
    def load(self, blocks: Iterable[Mapping[str, Tensor]]) -> None:
        """Copy full tensors to where the engine has them, a block's at once. It must have packed none.

        vLLM's own loading takes several launches a tensor, and Python around each.
        """
        for block in blocks:
            targets, sources = [], []
            for name, tensor in block.items():
                for share in self._shares[self.numbers[name]]:  # a tied head has none
                    source = as_rows(tensor)[share.rows, share.columns]
                    rows, columns = source.shape
                    target = as_rows(share.read().detach())
                    targets.append(target[share.top : share.top + rows, :columns])
                    sources.append(source)
            if targets:
                torch._foreach_copy_(targets, sources)

    def checksums(self, *, packed: bool) -> Tensor:
        """Returns this rank's part of each tensor's checksum, summed over its copies, [names] int64.

        Args:
            packed: also compare the packed matrices of a CPU engine, which takes longer than a push.
        """
        sums = torch.zeros(len(self.shapes), dtype=torch.int64, device=self.device)
        plain = (group for (alone, *_), group in self._groups.items() if packed or alone is None)
        return sums_of(plain, sums, self.dtype)


def find_base(weights: EngineWeights, model: nn.Module, unused: nn.Module | None) -> None:
    """Add all matrices of an engine's `model` but its adapters.

    Args:
        unused: a layer with whose packed matrix the engine does not compute.
    """
    shapes, fused = weights.shapes, {"gate_up_proj": ["gate_proj", "up_proj"]}
    fused |= getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        if is_experts(layer):
            _add_experts(weights, layer, path.partition(".experts")[0])
            continue
        path = path.removesuffix(".base_layer")  # of a LoRA layer
        parent, _, last = path.rpartition(".")
        for parameter, tensor in layer.named_parameters(recurse=False):
            parts = fused.get(last, [last])
            names = [".".join(filter(None, (parent, part, parameter))) for part in parts]
            if names[0] not in shapes:  # a matrix that Hugging Face merges too
                names = [f"{path}.{parameter}"]
            packs_convolution = hasattr(layer, "_cpu_unpacked_conv_weight")
            # vLLM drops a matrix after packing it, and packs a convolution's, so their shapes come from the layer.
            is_whole = len(tensor) > 0 and tensor.ndim < 3 and not packs_convolution
            is_fused = len(names) > 1
            heights = [len(tensor)] if is_whole and not is_fused else layer.output_partition_sizes
            if len(heights) != len(names):  # one matrix is several of vLLM's, on one rank
                heights = [shapes[name][0] for name in names]
            width = (*tensor.shape, 1)[1]
            if not is_whole:  # a replicated layer has no part of its inputs
                width = getattr(layer, "input_size_per_partition", layer.input_size)
            add = partial(weights.add, heights=dict(zip(names, heights, strict=True)), width=width)
            if packs_convolution:
                add(partial(_unpacked_convolution, layer, sum(heights), width), is_packed=True)
            elif len(tensor) > 0:
                add(partial(getattr, layer, parameter))
            if parameter == "weight" and hasattr(layer, "cpu_linear") and layer is not unused:
                add(partial(_unpacked_linear, layer, width, weights.dtype), is_packed=True)


def find_adapter(weights: EngineWeights, model: nn.Module) -> None:
    """Add A and B of every adapted layer of an engine's `model`. A slice of a fused layer without an adapter has none."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in adapted_layers(model).items():
        parent, _, last = path.rpartition(".")
        for number, part in enumerate(fused.get(last, [last])):
            for letter, matrix in zip("AB", adapter_buffers(layer, number), strict=True):
                name = f"{parent}.{part}.lora_{letter}.weight"
                if name in weights.shapes:
                    height, width = matrix.shape
                    weights.add(lambda matrix=matrix: matrix, {name: height}, width)


def _add_experts(weights: EngineWeights, layer: nn.Module, prefix: str) -> None:
    """Add a layer's experts. Each rank has a share of every expert; on a CPU it is padded."""
    isa = experts_isa(layer)
    for parameter, projections in EXPERTS.items():
        num_experts, rows, width = getattr(layer, parameter).shape
        names = [
            f"{prefix}.experts.{expert}.{projection}.weight"
            for expert in range(num_experts)
            for projection in projections
        ]
        full_rows, full_columns = weights.shapes[names[0]]
        first = weights.rank * full_rows // weights.degree, 0
        if parameter == "w2_weight":
            first = 0, weights.rank * full_columns // weights.degree
        height = rows // len(projections)
        read = partial(getattr, layer, parameter)
        if isa is not None:
            read = partial(_unpacked_experts, layer, parameter, isa)
        own = slice(first[0], first[0] + height), slice(first[1], first[1] + width)
        shares = {name: _Share(read, i * height, *own) for i, name in enumerate(names)}
        row_weights = place_weights(torch.arange(first[0], first[0] + height))[None]  # [1, height]
        weights.put(shares, [1] * len(names), row_weights, is_packed=isa is not None)


def is_experts(layer: nn.Module) -> bool:
    """Whether a layer of the engine holds a mixture's experts."""
    return all(hasattr(layer, parameter) for parameter in EXPERTS)


def share_of(size: int, full: int, rank: int, degree: int) -> tuple[int, int]:
    """Returns (start of a rank's share of a dimension, number of ranks with the same share) for its local and full size.

    Example: with 2 key heads on 4 ranks, rank 3 has a copy of the second head: size 64 of 128 -> (64, 2).
    """
    replicas = max(1, degree * min(size, full) // full)  # a vocabulary is padded at its end
    return rank // replicas * size, replicas


def _unpacked_linear(layer: nn.Module, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns a layer's matrix [rows, columns]: its product with the identity, exact but for the sign of zeros and denormal
    numbers. oneDNN's packed copy cannot be read otherwise."""
    return layer.quant_method.apply(layer, torch.eye(columns, dtype=dtype)).t()


def _unpacked_convolution(layer: nn.Module, rows: int, columns: int) -> Tensor:
    """Returns a depthwise convolution's matrix [rows, columns]."""
    return unpacked(layer.weight, rows, columns, pack_convolution)[0]


def _unpacked_experts(layer: nn.Module, parameter: str, isa: str) -> Tensor:
    """Returns the matrices of a layer's experts [E, rows, columns]."""
    packed = getattr(layer, parameter)
    return unpacked(packed, *packed.shape[1:], partial(pack_experts, isa=isa))


def unpacked(packed: Tensor, rows: int, columns: int, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns matrices as they were before `pack` moved their elements, [n, rows, columns].

    Where each goes is seen by packing the row numbers and the column numbers of a matrix, as bits of the weights' dtype.
    """
    integers = INTEGERS[packed.itemsize]
    places = torch.arange(rows, dtype=integers), torch.arange(columns, dtype=integers)
    row, column = (
        pack(numbers.contiguous().view(packed.dtype)).flatten().view(integers).long()
        for numbers in torch.meshgrid(*places, indexing="ij")
    )  # [rows * columns] each
    matrices = packed.new_empty(packed.numel() // len(row), rows, columns)
    matrices[:, row, column] = packed.detach().reshape(len(matrices), -1)
    return matrices
