"""Proof that a weight sync arrived: what the policy holds, what was sent, and what the engine now computes with, compared.

Exact, and independent of how two implementations round. Of every tensor some elements are compared, other ones at
each push (see weight_samples.py); vectors are compared whole:

- held = sent: each rank's own shard of the policy with what was yielded to the engine.
- all sent: the engine has no parameter that was not sent in this push.
- sent = arrived: with this rank's tensor-parallel share, in the engine's own layout. A GPU computes with just that. A CPU
  engine replaces the matrix of a linear layer by a packed copy that only its product can read: there each matrix is compared
  right before it is packed, and one in 32 of the packed copies as well (at the first push all), by the columns that the product
  returns for unit vectors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan_rl.weight_samples import Part, part_of, sampled_columns

if TYPE_CHECKING:
    from torchtitan_rl.trainer.held_weights import HeldSample

READ_BACK_ONE_IN = 32
"""Of the packed layers, at each push but the first."""

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
        self._sent: dict[str, Tensor] = {}  # [rows, block] of each tensor
        self._sent_columns: dict[str, Tensor] = {}  # [rows, columns] of those that are read back
        self._shapes: dict[str, tuple[int, int]] = {}
        self._whole: dict[tuple[int, int], Part] = {}
        self._shares: dict[str, Part] = {}
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
        self._sent_columns.clear()
        self._arrived.clear()
        read_back = {name for layer in self._read_back() for name in self._packed[layer]}
        for name, tensor in weights:
            matrix = _matrix(tensor)
            self._shapes[name] = height, width = matrix.shape
            self._sent[name] = self._whole_of(height, width, matrix.device).sample(matrix, self.turn)[1]
            if name in read_back:
                self._sent_columns[name] = matrix[:, sampled_columns(width, self.turn)[0]].clone()
            yield name, tensor

    def _whole_of(self, height: int, width: int, device: torch.device) -> Part:
        if (height, width) not in self._whole:
            rows = torch.arange(height, device=device)
            self._whole[height, width] = part_of(rows, height, width, slice(0, width), rows)
        return self._whole[height, width]

    def _look(self, names: Iterable[str]) -> None:
        """Note the sampled elements that the engine has of these beside those that were sent."""
        for name in names:
            if name in self._sent:
                piece = self._pieces[name]
                owned = _matrix(getattr(piece.layer, piece.parameter))[piece.rows]  # [rows, width] of this rank
                rows, values = self._share(name, owned).sample(owned, self.turn)
                self._arrived.append((name, values, self._sent_rows(name, rows)))

    def _sent_rows(self, name: str, rows: Tensor | None) -> Tensor:
        return self._sent[name] if rows is None else self._sent[name][rows]

    def _share(self, name: str, owned: Tensor) -> Part:
        """Of the tensor, what `owned`, [rows, width], should be."""
        if name not in self._shares:
            height, width = self._shapes[name]
            begin, end = self._range(len(owned), height)
            rows = torch.arange(height, device=owned.device)[begin:end]
            columns = slice(*self._range(owned.shape[1], width))
            self._shares[name] = part_of(rows, height, width, columns, rows - begin)
        return self._shares[name]

    def _range(self, size: int, full: int) -> tuple[int, int]:
        """Where this rank's share of `size` begins and ends in the full tensor, by nothing but these two.

        Example: of 2 key heads on 4 ranks, rank 3 has a copy of the second: size 64 of 128 -> (64, 128).
        """
        replicas = max(1, self._tp_size * size // full)
        begin = self._tp_rank // replicas * size
        return begin, min(begin + size, full)  # a vocabulary is padded at its end

    def _read_back(self) -> list[nn.Module]:
        """The packed layers whose turn it is: some, so that after READ_BACK_ONE_IN pushes all were."""
        stride = min(READ_BACK_ONE_IN, len(self._packed)) if self.turn else 1
        return list(self._packed)[self.turn % stride :: stride] if self._packed else []

    def _look_into_packed(self) -> None:
        """As `_look`, by the products of these layers."""
        for layer in self._read_back():
            local_width = layer.input_size_per_partition
            for name in self._packed[layer]:
                if name in self._sent:
                    height, width = self._shapes[name]
                    where, columns = sampled_columns(width, self.turn, *self._range(local_width, width))
                    rows = self._pieces[name].rows
                    share = slice(*self._range(rows.stop - rows.start, height))
                    expected = self._sent_columns[name][share, columns]
                    ones = torch.arange(local_width)[where]
                    units = nn.functional.one_hot(ones, local_width).to(expected.dtype)  # [columns, width]
                    product = layer.quant_method.apply(layer, units).t()  # [all rows, columns]
                    self._arrived.append((name, product[rows][: len(expected)], expected))

    def faults(self, held: Iterable["HeldSample"]) -> list[str]:
        """What of the last push is not as it should be, in words that begin with the tensor's name.

        Args:
            held: of the turn that `turn` says.
        """
        self._look(self._kept)
        self._look_into_packed()
        held = [(one.name, self._sent_rows(one.name, one.rows), one.values) for one in held if one.name in self._sent]
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
