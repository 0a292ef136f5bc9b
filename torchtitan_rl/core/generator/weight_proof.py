"""Proof that a weight sync arrived: what the policy holds and what the engine now computes with, compared.

Exact, and independent of how two implementations round. Of every tensor some elements are compared, other ones at
each push (see weight_samples.py); vectors are compared whole:

- all sent: the engine has no parameter that was not sent in this push.
- held = arrived, of a tensor that this rank holds whole.
- held = sent = arrived, of one that it holds a shard of: the shard with what was yielded to the engine, and that with the
  engine's.

What arrived is this rank's tensor-parallel share, in the engine's own layout. A GPU computes with just that. A CPU
engine replaces the matrix of a linear layer by a packed copy that only its product can read: there each matrix is looked at
right before it is packed, and one in 64 of the packed copies as well (at the first push all), by the columns that the product
returns for unit vectors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan_rl.core.generator.weight_samples import Part, part_of, sample_together, sampled_columns

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.held_weights import HeldWeights

READ_BACK_ONE_IN = 64
"""Pushes in which every packed layer is read back once; at the first push all are."""

Arrived = tuple[Iterable[str], tuple[Tensor | None, ...], Tensor]
"""(Hugging Face names of a parameter of the engine, and as `sample_together` the rows of each and all values)"""

Compared = tuple[Iterable[str], Tensor, list[Tensor]]
"""(Hugging Face names, their values one after another in the engine's dtype, what each should be)"""


@dataclass(frozen=True, eq=False)
class EngineParameter:
    """Holds this rank's share of one Hugging Face tensor, or of several, one under another."""

    layer: nn.Module
    name: str
    """In its layer."""
    rows: dict[str, slice]
    """Of each tensor, by its name."""


class WeightProof:
    """Follows one push after another on this rank's part of the engine."""

    def __init__(self, model: nn.Module, *, tp_rank: int, tp_size: int) -> None:
        self.parameters = list(_parameters(model))
        self._names = [name for parameter in self.parameters for name in parameter.rows]
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._turn = -1
        self._held: HeldWeights | None = None
        self._sent: dict[str, Tensor | None] = {}  # [rows * block] of each tensor; None of one that is held whole
        self._arrived: list[Arrived] = []
        self._sent_parts: dict[str, Part] = {}  # all of each tensor that was sent and is not held whole
        self._shares: dict[EngineParameter, tuple[Part, ...]] = {}
        # Matrices that a CPU engine has packed, and of these the ones that it dropped.
        self._packed = [p for p in self.parameters if p.name == "weight" and hasattr(p.layer, "cpu_linear")]
        self._dropped = [p for p in self._packed if not p.layer.weight.numel()]
        self._kept = [p for p in self.parameters if p not in self._dropped]
        self._read_back: list[EngineParameter] = []
        self._columns: dict[EngineParameter, Tensor] = {}  # [rows, columns] of those whose packed copy is read back
        for parameter in self._dropped:
            self._look_before_packing(parameter)

    def _look_before_packing(self, parameter: EngineParameter) -> None:
        method = parameter.layer.quant_method  # each layer has its own
        pack = method.process_weights_after_loading

        def look_and_pack(layer: nn.Module) -> None:
            self._look([parameter])
            if parameter in self._read_back:
                self._columns[parameter] = layer.weight[:, sampled_columns(layer.weight.shape[1], self._turn)].clone()
            pack(layer)

        method.process_weights_after_loading = look_and_pack

    def watch(self, weights: Iterable[tuple[str, Tensor]], held: "HeldWeights") -> Iterator[tuple[str, Tensor]]:
        """Pass `weights` on, noting what is sent of those that this rank does not hold whole."""
        self._turn += 1
        self._held = held
        self._sent.clear()
        self._arrived.clear()
        self._columns.clear()
        stride = READ_BACK_ONE_IN if self._turn else 1
        self._read_back = self._packed[self._turn % stride :: stride]
        for name, tensor in weights:
            self._sent[name] = None if name in held.whole else self._sample(name, tensor)
            yield name, tensor

    def _sample(self, name: str, tensor: Tensor) -> Tensor:
        """[rows * block], of all that is sent."""
        if name not in self._sent_parts:
            height, width = _matrix_shape(tensor.shape)
            rows = torch.arange(height, device=tensor.device)
            self._sent_parts[name] = part_of(rows, height, width, slice(0, width), rows)
        return self._sent_parts[name].sample(tensor, self._turn)[1].clone()

    def _whole(self, name: str) -> Part:
        """Says the tensor's shape, and the block that it is looked at in."""
        return self._held.whole.get(name) or self._sent_parts[name]

    def _look(self, parameters: Iterable[EngineParameter]) -> None:
        """Note the sampled elements that the engine has of these."""
        # Each operation on vLLM's own kind of parameter takes three times as long otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if self._sent.keys() >= parameter.rows.keys():
                    tensor = getattr(parameter.layer, parameter.name)
                    shares = self._shares.get(parameter) or self._shares_of(parameter, tensor)
                    self._arrived.append((parameter.rows, *sample_together(shares, tensor, self._turn)))

    def _shares_of(self, parameter: EngineParameter, tensor: Tensor) -> tuple[Part, ...]:
        """What the engine's `tensor` should have of each Hugging Face tensor, and where."""
        shares = []
        for name, local in parameter.rows.items():
            whole = self._whole(name)
            begin, end = self._range(local.stop - local.start, whole.height)
            rows = torch.arange(begin, end, device=tensor.device)
            columns = slice(*self._range(_matrix_shape(tensor.shape)[1], whole.width))
            shares.append(part_of(rows, whole.height, whole.width, columns, rows - begin + local.start))
        self._shares[parameter] = tuple(shares)
        return self._shares[parameter]

    def _range(self, size: int, full: int) -> tuple[int, int]:
        """Where this rank's share of `size` begins and ends in the full tensor, by nothing but these two.

        Example: of 2 key heads on 4 ranks, rank 3 has a copy of the second: size 64 of 128 -> (64, 128).
        """
        replicas = max(1, self._tp_size * size // full)
        begin = self._tp_rank // replicas * size
        return begin, min(begin + size, full)  # a vocabulary is padded at its end

    def _look_into_packed(self) -> Iterator[Compared]:
        """Columns of the packed copies, which only a product returns, beside those of what was packed."""
        for parameter in self._read_back:
            layer = parameter.layer
            width = layer.input_size_per_partition
            where = sampled_columns(width, self._turn)
            expected = self._columns.get(parameter) if parameter in self._dropped else layer.weight[:, where]
            if expected is not None:  # else it was not loaded
                units = expected.new_zeros(expected.shape[1], width)
                units[:, where].fill_diagonal_(1)  # [columns, width]
                product = layer.quant_method.apply(layer, units).t()  # [rows, columns]
                for name, rows in parameter.rows.items():
                    yield (name,), product[rows].flatten(), [expected[rows].flatten()]

    def faults(self) -> list[str]:
        """What of the last push is not as it should be, in words that begin with the tensor's name."""
        self._look(self._kept)
        wanted, shards = dict(self._sent), []
        for name, rows, values in self._held.samples(self._turn):
            if name in self._held.whole:
                wanted[name] = values
            elif name in wanted:
                sent = wanted[name] if rows is None else self._rows_of(wanted, name, rows)
                shards.append(((name,), sent, [values]))
        arrived = [
            (names, values, [wanted[n] if at is None else self._rows_of(wanted, n, at) for n, at in zip(names, rows)])
            for names, rows, values in self._arrived
        ]
        arrived += self._look_into_packed()
        # All at once: each comparison asks a GPU to come to rest.
        whole = len(self._arrived) == len(self.parameters) and _equal([*arrived, *shards])
        faults = {} if whole else self._named(arrived, shards)
        self._sent.clear()  # a load that is not watched is not looked at
        return [f"{name} {faults[name]}" for name in self._names if name in faults]

    def _named(self, arrived: list[Compared], shards: list[Compared]) -> dict[str, str]:
        """What is wrong, by the name of the tensor."""
        not_loaded = set(self._names).difference(*(names for names, *_ in self._arrived))
        return (
            dict.fromkeys(not_loaded, "was sent, but not loaded")
            | dict.fromkeys(
                _differing(arrived), "did not arrive: the engine computes with other values than the policy holds"
            )
            | dict.fromkeys(_differing(shards), "was sent with other values than the policy holds")
            | dict.fromkeys(set(self._names).difference(self._sent), "was not sent")
        )

    def _rows_of(self, wanted: dict[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """[rows * block], those of what should be there."""
        return wanted[name].view(-1, self._whole(name).block)[rows].flatten()


def _equal(compared: list[Compared]) -> bool:
    found = torch.cat([values for _, values, _ in compared])
    return torch.equal(found, torch.cat([one for *_, expected in compared for one in expected]).to(found.dtype))


def _differing(compared: list[Compared]) -> Iterator[str]:
    """The names of those that differ."""
    for names, values, expected in compared:
        of_each = values.split([len(one) for one in expected])
        for name, mine, one in zip(names, of_each, expected, strict=True):
            if not _equal([((name,), mine, [one])]):
                yield name


def _parameters(model: nn.Module) -> Iterator[EngineParameter]:
    """Every parameter of the engine, through vLLM's fused layers."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        parent, _, last = path.rpartition(".")
        for parameter, tensor in layer.named_parameters(recurse=False):
            names = fused.get(last, [last])
            # A packed matrix has no rows of its own any more.
            sizes = layer.output_partition_sizes if len(names) > 1 or not len(tensor) else [len(tensor)]
            rows, begin = {}, 0
            for name, size in zip(names, sizes, strict=True):
                rows[".".join(filter(None, (parent, name, parameter)))] = slice(begin, begin + size)
                begin += size
            yield EngineParameter(layer, parameter, rows)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, width); a vector's width is 1."""
    return (*shape, 1)[:2]
