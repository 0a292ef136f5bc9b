"""The experts' weights that an engine computes with, matrix by matrix, for their checksums.

vLLM holds all experts of a layer in two parameters: `w13_weight` [E, 2 F, D], gate above up, and `w2_weight` [E, D, F]. On a CPU it
pads F and rearranges the elements of each matrix for its kernel.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_rl.checksum import place_weights
from torchtitan_rl.sync.packed_order import packed_order

PROJECTIONS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""The matrices of each expert that a parameter of vLLM holds, one above the other."""


class ExpertPart(NamedTuple):
    """A parameter of this rank's engine with k matrices of experts: this rank's share of each."""

    layer: nn.Module
    parameter: str
    names: list[int]  # [k], the matrices' indices in ShardChecksums.shapes
    weights: Tensor  # [1, rows of a matrix]
    first_column: int
    order: (
        Tensor | None
    )  # [elements of an expert], the place of each stored element in the expert; None: not packed

    def matrices(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
        """Yields the k matrices, [E, rows of an expert, columns], and the index of their first column."""
        stored = getattr(self.layer, self.parameter).detach()  # [E, rows, columns]
        if self.order is None:
            yield stored, self.first_column
            return
        unpacked = torch.empty_like(stored).flatten(1)  # [E, rows * columns]
        unpacked[:, self.order] = stored.flatten(1)
        yield unpacked.view(stored.shape), self.first_column


def is_experts(layer: nn.Module) -> bool:
    """Whether a layer of the engine holds a mixture's experts."""
    return hasattr(layer, "w13_weight") and hasattr(layer, "w2_weight")


def expert_parts(
    layer: nn.Module, path: str, shapes: Mapping[str, tuple[int, int]], *, rank: int, degree: int
) -> Iterator[ExpertPart]:
    """Yields the parts of a layer of experts.

    Args:
        path: the layer's name in the engine.
        shapes: of every whole matrix, by its Hugging Face name: see `ShardChecksums.shapes`.
        rank, degree: this rank's place among the engine's ranks, and their number.
    """
    prefix, numbers = (
        path.partition(".experts")[0],
        {name: number for number, name in enumerate(shapes)},
    )
    for parameter, projections in PROJECTIONS.items():
        stored = getattr(layer, parameter)
        names = [
            f"{prefix}.experts.{expert}.{projection}.weight"
            for expert in range(len(stored))
            for projection in projections
        ]
        height = stored.shape[1] // len(projections)
        rows, columns = shapes[names[0]]
        first_row, first_column = (
            (rank * rows // degree, 0) if projections[1:] else (0, rank * columns // degree)
        )
        weights = place_weights(first_row + torch.arange(height, device=stored.device))[
            None
        ]  # [1, height]
        yield ExpertPart(
            layer,
            parameter,
            [numbers[name] for name in names],
            weights,
            first_column,
            _order(layer, stored),
        )


def _order(layer: nn.Module, stored: Tensor) -> Tensor | None:
    """Returns where an expert's elements are in its packed copy, [rows * columns]; None if they are not packed."""
    isa = getattr(layer.quant_method.moe_kernel.fused_experts, "isa", None)  # of a CPU's kernel
    return None if isa is None else packed_order(*stored.shape[1:], stored.dtype, isa)
