"""Proof that a weight sync arrived: checksums of what the policy holds, what was sent and what the engine computes with.

All three are checksums of the same thing, the share of each Hugging Face tensor that this rank's part of the engine computes
with, so a fault is named by tensor. A GPU engine computes with its parameters. A CPU engine packs each linear layer's matrix
and drops it: the matrix is summed right before it is packed, and the packed copy is read back by its product with unit vectors.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_rl.core.checksum import ROWS, Share, checksums, row_weights
from torchtitan_rl.core.device import ON_CPU

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.held_weights import HeldWeights

CHECK_ONE_IN = 8 if ON_CPU else 1
"""The first push checks every tensor; later ones check each tensor once in so many pushes, by turns."""

READ_BACK_ONE_IN = 64
"""The first push reads every packed copy back; later ones read each back once in so many pushes, by turns."""

UNITS = 64
"""Columns of a packed copy that one product reads back."""


NOT_SENT = "was not sent"
SENT = "was sent with other values than the policy holds"
NOT_LOADED = "was sent, but not loaded"
ARRIVED = "did not arrive: the engine computes with other values than the policy holds"
CHANGED = "is a buffer of the engine that has changed since its start"


@dataclass(frozen=True, eq=False)
class EngineParameter:
    """This rank's share of one Hugging Face tensor, or of several, one under another."""

    layer: nn.Module
    name: str
    """The parameter's name in its layer."""
    rows: dict[str, slice]
    """The rows of each tensor, by its Hugging Face name."""
    width: int


class Sums(NamedTuple):
    """Checksums and what they should be."""

    fault: str
    """Said of a name whose checksum is another."""
    names: Collection[str]
    found: Tensor
    """[names]"""
    expected: Tensor | None = None
    """[names]; None: what the policy holds."""


class WeightProof:
    """Follows one push after another on this rank's part of the engine."""

    def __init__(self, model: nn.Module, *, tp_rank: int, tp_size: int, dtype: torch.dtype) -> None:
        self.parameters = list(_parameters(model))
        self._model, self._tp_rank, self._tp_size, self._dtype = model, tp_rank, tp_size, dtype
        self._buffers = self._buffer_sums()
        self._turn = -1
        self._held: HeldWeights | None = None
        self._shares: dict[str, list[Share]] = {}  # of every tensor-parallel rank
        self._weights: dict[EngineParameter, Tensor] = {}  # [names, rows]
        self._sent: set[str] = set()
        self._loaded: set[EngineParameter] = set()
        self._sums: list[Sums] = []
        self._to_pack: dict[EngineParameter, Tensor] = {}  # [names], of those whose packed copy is read back
        # Matrices that a CPU engine has packed, and those of them that it dropped.
        self._packed = [p for p in self.parameters if p.name == "weight" and hasattr(p.layer, "cpu_linear")]
        self._dropped = [p for p in self._packed if not p.layer.weight.numel()]
        self._due: list[EngineParameter] = []
        self._read_back: list[EngineParameter] = []
        for parameter in self._dropped:
            self._sum_before_packing(parameter)

    def _sum_before_packing(self, parameter: EngineParameter) -> None:
        method = parameter.layer.quant_method  # each layer has its own
        pack = method.process_weights_after_loading

        def sum_and_pack(layer: nn.Module) -> None:
            self._look(parameter)
            pack(layer)

        method.process_weights_after_loading = sum_and_pack

    def watch(self, weights: Iterable[tuple[str, Tensor]], held: "HeldWeights") -> Iterator[tuple[str, Tensor]]:
        """Pass `weights` on and sum this rank's share of each tensor that is due in this push."""
        if self._held is not held:
            self._learn(held)
        self._turn += 1
        for kept in (self._sent, self._loaded, self._sums, self._to_pack):
            kept.clear()
        check, read_back = (CHECK_ONE_IN, READ_BACK_ONE_IN) if self._turn else (1, 1)
        self._due = self.parameters[self._turn % check :: check]
        self._read_back = self._packed[self._turn % read_back :: read_back]
        due = {name for parameter in self._due for name in parameter.rows}
        for name, tensor in weights:
            self._sent.add(name)
            if name in due:
                rows, columns = self._shares[name][self._tp_rank]
                share = tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]
                place = row_weights(torch.arange(rows.start, rows.stop, device=tensor.device))[None]  # [1, rows]
                self._sums.append(Sums(SENT, [name], checksums(share, place, columns.start, self._dtype)))
            yield name, tensor

    def _learn(self, held: "HeldWeights") -> None:
        """Derive every rank's share of each tensor from its shape here and as a whole."""
        self._held = held
        for parameter in self.parameters:
            height = max(local.stop for local in parameter.rows.values())
            weights = torch.zeros(len(parameter.rows), height, dtype=torch.int64)
            for number, (name, local) in enumerate(parameter.rows.items()):
                here, whole = (local.stop - local.start, parameter.width), held.shapes[name]
                self._shares[name] = [
                    tuple(share_of(*sizes, rank, self._tp_size) for sizes in zip(here, whole, strict=True))
                    for rank in range(self._tp_size)
                ]
                rows = self._shares[name][self._tp_rank][0]
                size = rows.stop - rows.start
                weights[number, local.start : local.start + size] = row_weights(torch.arange(rows.start, rows.stop))
            self._weights[parameter] = weights.to(held.device)

    def _look(self, parameter: EngineParameter) -> None:
        """Sum what the engine has of this parameter, if it is due."""
        self._loaded.add(parameter)
        tensor = getattr(parameter.layer, parameter.name).data
        if parameter in self._due:
            self._sums.append(Sums(ARRIVED, parameter.rows, self._sum(parameter, tensor)))
        if parameter in self._read_back:  # a product turns -0 into +0
            blocks = (slice(begin, begin + ROWS) for begin in range(0, len(tensor), ROWS))
            self._to_pack[parameter] = sum(self._sum(parameter, tensor[rows] + 0, rows=rows) for rows in blocks)

    def _sum(self, parameter: EngineParameter, tensor: Tensor, begin: int = 0, rows: slice = slice(None)) -> Tensor:
        """Checksums of the engine's tensor, [names], or of these rows of it and its columns from `begin` on."""
        first_column = self._shares[next(iter(parameter.rows))][self._tp_rank][1].start
        return checksums(tensor, self._weights[parameter][:, rows], first_column + begin)

    def _sum_packed(self, parameter: EngineParameter) -> Tensor:
        """Checksums of the packed copy, [names], read back by products with unit vectors, which are exact."""
        total, width = self._weights[parameter].new_zeros(len(parameter.rows)), parameter.width
        for begin in range(0, width, UNITS):
            units = torch.eye(min(UNITS, width - begin), width, dtype=self._dtype).roll(begin, 1)  # [U, width]
            product = parameter.layer.quant_method.apply(parameter.layer, units)  # [U, rows]
            total += self._sum(parameter, product.to(self._dtype).t() + 0, begin)
        return total

    def _buffer_sums(self) -> Tensor:
        """[buffers]"""
        sums = [
            checksums(matrix, row_weights(torch.arange(len(matrix), device=matrix.device))[None])
            for matrix in (buffer.reshape(*buffer.shape[:1], -1) for _, buffer in _constants(self._model))
        ]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64)

    @torch.no_grad()
    def faults(self) -> list[str]:
        """What is wrong after the last push, in words that begin with the tensor's name; collective."""
        for parameter in self.parameters:
            if parameter not in self._dropped:
                self._look(parameter)
        due = {name for parameter in self._due for name in parameter.rows}
        held = self._held.checksums(self._shares, due, self._dtype)[:, self._tp_rank]  # [names]
        buffers = [name for name, _ in _constants(self._model)]
        self._sums.append(Sums(CHANGED, buffers, self._buffer_sums(), self._buffers))
        for parameter, expected in self._to_pack.items():
            self._sums.append(Sums(ARRIVED, parameter.rows, self._sum_packed(parameter), expected))
        self._due, self._read_back = [], []  # a load that is not watched is not looked at
        return [f"{name} {fault}" for name, fault in self._named(held).items()]

    def _named(self, held: Tensor) -> dict[str, str]:
        """The fault of each tensor that has one.

        Args:
            held: [names]
        """
        # One transfer: each asks a GPU to come to rest.
        numbers = iter(
            torch.cat([held, *(tensor for sums in self._sums for tensor in sums[2:] if tensor is not None)]).tolist()
        )
        of_held = {name: next(numbers) for name in self._shares}
        wrong: dict[str, set[str]] = {fault: set() for fault in (ARRIVED, NOT_LOADED, SENT, NOT_SENT, CHANGED)}
        for sums in self._sums:
            found = [next(numbers) for _ in sums.names]
            expected = [of_held[name] if sums.expected is None else next(numbers) for name in sums.names]
            wrong[sums.fault].update(n for n, mine, should in zip(sums.names, found, expected) if mine != should)
        wrong[NOT_LOADED].update(*(p.rows for p in self.parameters if p not in self._loaded))
        wrong[NOT_SENT].update(self._shares.keys() - self._sent)
        faults = {
            name: fault for fault, names in wrong.items() for name in names
        }  # the last is the nearest to the cause
        order = [*self._shares, *(name for name, _ in _constants(self._model))]
        return {name: faults[name] for name in order if name in faults}


def share_of(size: int, full: int, rank: int, degree: int) -> slice:
    """A rank's share of a dimension, from its size here and as a whole.

    Example: of 2 key heads on 4 ranks, rank 3 has a copy of the second: size 64 of 128 -> 64:128.
    """
    replicas = max(1, degree * size // full)
    begin = rank // replicas * size
    return slice(begin, min(begin + size, full))  # a vocabulary is padded at its end


def _parameters(model: nn.Module) -> Iterator[EngineParameter]:
    """Every parameter of the engine, through vLLM's fused layers."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        parent, _, last = path.rpartition(".")
        for parameter, tensor in layer.named_parameters(recurse=False):
            names = fused.get(last, [last])
            # A packed matrix has no shape of its own any more.
            sizes = layer.output_partition_sizes if len(names) > 1 or not len(tensor) else [len(tensor)]
            width = (*tensor.shape, 1)[1] if len(tensor) else layer.input_size_per_partition
            rows, begin = {}, 0
            for name, size in zip(names, sizes, strict=True):
                rows[".".join(filter(None, (parent, name, parameter)))] = slice(begin, begin + size)
                begin += size
            yield EngineParameter(layer, parameter, rows, width)


def _constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The engine's buffers that follow from its config, such as the rotary cache."""
    return ((name, buffer) for name, buffer in model.named_buffers() if buffer.numel())
