"""Proof that a weight sync arrived: what the policy holds, what was sent, and what the engine now computes with, compared.

Exact, and independent of how two implementations round. Of every tensor some columns are compared element by element, in all
rows, other ones at each push (see weight_samples.py); vectors are compared whole:

- held = sent: each rank's own shard of the policy with what was yielded to the engine.
- all sent: the engine has no parameter that was not sent in this push.
- sent = arrived: with this rank's tensor-parallel share, in the engine's own layout. A GPU computes with just that. A CPU
  engine replaces the matrix of a linear layer by a packed copy that only its product can read: there each matrix is compared
  right before it is packed, and an eighth of the packed copies as well (at the first push all), by the columns that the product
  returns for unit vectors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan_rl.weight_samples import COLUMNS, sampled

if TYPE_CHECKING:
    from torchtitan_rl.trainer.held_weights import HeldSample

Compared = tuple[str, Tensor, Tensor]
"""(Hugging Face name, values, what they should be)"""


@dataclass(frozen=True)
class Piece:
    """Where the engine keeps this rank's share of one Hugging Face tensor."""

    layer: nn.Module
    parameter: str
    rows: slice
    """Of the layer's parameter, which may hold several tensors one under another."""


class WeightProof:
    """Follows one push after another on this rank's part of the engine."""

    def __init__(self, model: nn.Module, *, tp_rank: int, tp_size: int) -> None:
        self._pieces = dict(_pieces(model))
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self.turn = -1
        self._sent: dict[str, Tensor] = {}  # [rows, columns] of each tensor
        self._widths: dict[str, int] = {}
        self._arrived: list[Compared] = []
        # Matrices that a CPU engine has packed, by layer: those that it dropped, and all that it multiplies with.
        self._dropped: dict[nn.Module, list[str]] = {}
        self._packed: dict[nn.Module, list[str]] = {}
        for name, piece in self._pieces.items():
            if piece.parameter == "weight" and hasattr(piece.layer, "cpu_linear"):
                self._packed.setdefault(piece.layer, []).append(name)
                if not piece.layer.weight.numel():
                    self._dropped.setdefault(piece.layer, []).append(name)
        self._kept = self._pieces.keys() - {name for names in self._dropped.values() for name in names}
        for layer, names in self._dropped.items():
            self._look_before_packing(layer, names)

    def _look_before_packing(self, layer: nn.Module, names: list[str]) -> None:
        method = layer.quant_method  # each layer has its own
        pack = method.process_weights_after_loading

        def look_and_pack(layer: nn.Module) -> None:
            self._look(names)
            pack(layer)

        method.process_weights_after_loading = look_and_pack

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `weights` on, noting what is sent."""
        self.turn += 1
        self._sent.clear()
        self._arrived.clear()
        for name, tensor in weights:
            matrix = _matrix(tensor)
            self._widths[name] = width = matrix.shape[1]
            self._sent[name] = matrix[:, sampled(width, self.turn)[0]].clone()  # [rows, columns]
            yield name, tensor

    def _look(self, names: Iterable[str]) -> None:
        """Note the sampled columns that the engine has of these beside those that were sent."""
        for name in names:
            if name in self._sent:
                piece = self._pieces[name]
                matrix = _matrix(getattr(piece.layer, piece.parameter))  # [all rows, width]
                where, expected = self._share(name, matrix.shape[1])
                self._arrived.append((name, matrix[piece.rows, where][: len(expected)].clone(), expected))

    def _share(self, name: str, width: int) -> tuple[slice, Tensor]:
        """Where this rank's share, `width` columns wide, has sampled ones, and what was sent of them, [rows, columns]."""
        sent, rows, full = self._sent[name], self._pieces[name].rows, self._widths[name]
        where, columns = sampled(full, self.turn, *self._range(width, full))
        return where, sent[slice(*self._range(rows.stop - rows.start, len(sent))), columns]

    def _range(self, size: int, full: int) -> tuple[int, int]:
        """Where this rank's share of `size` begins and ends in the full tensor, by nothing but these two.

        Example: of 2 key heads on 4 ranks, rank 3 has a copy of the second: size 64 of 128 -> (64, 128).
        """
        replicas = max(1, self._tp_size * size // full)
        begin = self._tp_rank // replicas * size
        return begin, min(begin + size, full)  # a vocabulary is padded at its end

    def _look_into_packed(self) -> None:
        """As `_look`, by the products of some of the packed layers."""
        share = slice(self.turn % COLUMNS, None, COLUMNS) if self.turn else slice(None)
        for layer in list(self._packed)[share]:
            width = layer.input_size_per_partition
            for name in self._packed[layer]:
                if name in self._sent:
                    where, expected = self._share(name, width)
                    units = nn.functional.one_hot(torch.arange(width)[where], width).to(
                        expected.dtype
                    )  # [columns, width]
                    product = layer.quant_method.apply(layer, units).t()  # [all rows, columns]
                    self._arrived.append((name, product[self._pieces[name].rows][: len(expected)], expected))

    def faults(self, held: Iterable["HeldSample"]) -> list[str]:
        """What of the last push is not as it should be, in words that begin with the tensor's name.

        Args:
            held: of the turn that `turn` says.
        """
        self._look(self._kept)
        self._look_into_packed()
        held = [
            (one.name, self._sent[one.name][one.rows, one.columns], one.values)
            for one in held
            if one.name in self._sent
        ]
        found = dict.fromkeys(self._pieces.keys() - {name for name, *_ in self._arrived}, "was sent, but not loaded")
        found |= dict.fromkeys(
            _differing(self._arrived), "did not arrive: the engine computes with other values than were sent"
        )
        found |= dict.fromkeys(_differing(held), "was sent with other values than the policy holds")
        found |= dict.fromkeys(self._pieces.keys() - self._sent.keys(), "was not sent")
        return [f"{name} {found[name]}" for name in self._pieces if name in found]


def _differing(compared: list[Compared]) -> list[str]:
    """The names of those that differ."""
    found, expected = (torch.cat([one[i].flatten() for one in compared]) for i in (1, 2))
    if torch.equal(found, expected):  # at once: each comparison asks a GPU to come to rest
        return []
    return [name for name, values, expected in compared if not torch.equal(values.to(expected.dtype), expected)]


def _pieces(model: nn.Module) -> Iterator[tuple[str, Piece]]:
    """(Hugging Face name, piece) of every parameter, through vLLM's fused layers."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        parent, _, last = path.rpartition(".")
        for parameter, tensor in layer.named_parameters(recurse=False):
            names = fused.get(last, [last])
            # A packed matrix has no rows of its own any more.
            sizes = layer.output_partition_sizes if len(names) > 1 or not len(tensor) else [len(tensor)]
            begin = 0
            for name, size in zip(names, sizes, strict=True):
                yield (
                    ".".join(filter(None, (parent, name, parameter))),
                    Piece(layer, parameter, slice(begin, begin + size)),
                )
                begin += size


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, width]; a vector's width is 1."""
    return tensor if tensor.ndim > 1 else tensor[:, None]
