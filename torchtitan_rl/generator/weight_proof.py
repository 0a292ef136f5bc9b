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
"""Pushes in which every packed layer is read back once; at the first push all are."""

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
        self._shapes: dict[str, tuple[int, int]] = {}
        self._wholes: dict[str, Part] = {}
        self._shares: dict[str, Part] = {}
        self._arrived: list[Compared] = []
        self._read_back: list[nn.Module] = []
        # Matrices that a CPU engine has packed, by layer: those that it dropped, and all that it multiplies with.
        self._dropped: dict[nn.Module, list[str]] = {}
        self._packed: dict[nn.Module, list[str]] = {}
        self._columns: dict[nn.Module, Tensor] = {}  # [rows, columns] of those whose packed copy is read back
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
            if layer in self._read_back:
                self._columns[layer] = layer.weight[:, sampled_columns(layer.weight.shape[1], self.turn)].clone()
            pack(layer)

        method.process_weights_after_loading = look_and_pack

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `weights` on, noting what is sent."""
        self.turn += 1
        self._sent.clear()
        self._arrived.clear()
        self._columns.clear()
        self._read_back = self._layers_to_read_back()
        for name, tensor in weights:
            whole = self._wholes.get(name) or self._whole_of(name, tensor)
            sample = whole.sample(tensor, self.turn)[1]
            self._sent[name] = sample.clone() if whole.vector else sample
            yield name, tensor

    def _whole_of(self, name: str, tensor: Tensor) -> Part:
        height, width = self._shapes[name] = _matrix_shape(tensor.shape)
        rows = torch.arange(height, device=tensor.device)
        whole = self._wholes[name] = part_of(rows, height, width, slice(0, width), rows)
        return whole

    def _look(self, names: Iterable[str]) -> None:
        """Note the sampled elements that the engine has of these beside those that were sent."""
        # Each operation on vLLM's own kind of parameter takes three times as long otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            for name in names:
                if name in self._sent:
                    piece = self._pieces[name]
                    parameter = getattr(piece.layer, piece.parameter)
                    share = self._shares.get(name) or self._share(name, parameter)
                    rows, values = share.sample(parameter, self.turn)
                    self._arrived.append((name, values, self._sent_rows(name, rows)))

    def _sent_rows(self, name: str, rows: Tensor | None) -> Tensor:
        sent = self._sent[name]
        return sent if rows is None else sent.view(-1, self._wholes[name].block)[rows].flatten()

    def _share(self, name: str, parameter: Tensor) -> Part:
        """What the engine's `parameter` should have of the tensor, and where."""
        height, width = self._shapes[name]
        piece_rows = self._pieces[name].rows
        begin, end = self._range(piece_rows.stop - piece_rows.start, height)
        rows = torch.arange(begin, end, device=parameter.device)
        columns = slice(*self._range(_matrix_shape(parameter.shape)[1], width))
        share = self._shares[name] = part_of(rows, height, width, columns, rows - begin + piece_rows.start)
        return share

    def _range(self, size: int, full: int) -> tuple[int, int]:
        """Where this rank's share of `size` begins and ends in the full tensor, by nothing but these two.

        Example: of 2 key heads on 4 ranks, rank 3 has a copy of the second: size 64 of 128 -> (64, 128).
        """
        replicas = max(1, self._tp_size * size // full)
        begin = self._tp_rank // replicas * size
        return begin, min(begin + size, full)  # a vocabulary is padded at its end

    def _layers_to_read_back(self) -> list[nn.Module]:
        """The packed layers whose turn it is: some, so that after READ_BACK_ONE_IN pushes all were."""
        stride = READ_BACK_ONE_IN if self.turn else 1
        return list(self._packed)[self.turn % stride :: stride]

    def _look_into_packed(self) -> None:
        """Compare columns of the packed copies, which only a product returns, with what was packed."""
        for layer in self._read_back:
            width = layer.input_size_per_partition
            where = sampled_columns(width, self.turn)
            expected = self._columns.get(layer) if layer in self._dropped else layer.weight[:, where]
            if expected is not None:  # else it was not loaded
                units = expected.new_zeros(expected.shape[1], width)
                units[:, where].fill_diagonal_(1)  # [columns, width]
                product = layer.quant_method.apply(layer, units).t()  # [rows, columns]
                for name in self._packed[layer]:
                    rows = self._pieces[name].rows
                    self._arrived.append((name, product[rows].flatten(), expected[rows].flatten()))

    def faults(self, held: Iterable["HeldSample"]) -> list[str]:
        """What of the last push is not as it should be, in words that begin with the tensor's name.

        Args:
            held: of the turn that `turn` says, in the policy's own dtype.
        """
        self._look(self._kept)
        self._look_into_packed()
        held = [(name, values, self._sent_rows(name, rows)) for name, rows, values in held if name in self._sent]
        found = dict.fromkeys(self._pieces.keys() - {name for name, *_ in self._arrived}, "was sent, but not loaded")
        if not _equal([*self._arrived, *held]):  # all at once: each comparison asks a GPU to come to rest
            not_arrived = "did not arrive: the engine computes with other values than were sent"
            found |= dict.fromkeys(_differing(self._arrived), not_arrived)
            found |= dict.fromkeys(_differing(held), "was sent with other values than the policy holds")
        found |= dict.fromkeys(self._pieces.keys() - self._sent.keys(), "was not sent")
        self._sent.clear()  # a load that is not watched is not looked at
        return [f"{name} {found[name]}" for name in self._pieces if name in found]


def _equal(compared: list[Compared]) -> bool:
    if not compared:
        return True
    _, values, expected = (list(column) for column in zip(*compared, strict=True))
    whole = torch.cat(expected)
    return torch.equal(torch.cat(values).to(whole.dtype), whole)


def _differing(compared: list[Compared]) -> list[str]:
    """The names of those that differ."""
    return [one[0] for one in compared if not _equal([one])]


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


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, width); a vector's width is 1."""
    return (*shape, 1)[:2]
