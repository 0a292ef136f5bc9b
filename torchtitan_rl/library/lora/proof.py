"""Proof that an adapter arrived: A and B of every adapted layer, compared at every push, with the kind of fault."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_rl.proof.checksum import place_weights
from torchtitan_rl.proof.weight_proof import NOT_SENT, OTHER_VALUES, WeightProof

STALE = "is stale: it has the values of the push before"
MISSING = "is missing: the engine has zeros or no place for it"
SCALED = "arrived with the wrong scale: multiplied by"


class AdapterProof(WeightProof):
    """Compares the adapters in this rank's engine with the policy's. `policy_shards` is an AdapterChecksums."""

    _before: Tensor | None = None  # the policy's checksums at the last push, [names]

    def parameters(self, model: nn.Module) -> Iterator[tuple[Any, str, dict[str, int], int]]:
        """Yields this rank's A and B of every adapted layer. A slice of a fused layer without an adapter has none."""
        fused = getattr(model, "packed_modules_mapping", {})
        for path, layer in model.lora_manager.modules.items():
            parent, _, last = path.rpartition(".")
            for part, one in enumerate(fused.get(last, [last])):
                for letter, stack in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                    name, matrix = f"{parent}.{one}.lora_{letter}.weight", stack[part][0, 0]  # of the only adapter
                    if name in self._policy_shards.shapes:
                        yield SimpleNamespace(weight=matrix), "weight", {name: len(matrix)}, matrix.shape[1]

    @torch.no_grad()
    def adapter_faults(self, sent: Collection[str]) -> list[str]:
        """Returns one sentence per fault after a push, each beginning with the tensor's name. Collective.

        Args:
            sent: names of the tensors that were sent.
        """
        sums = self._sums(self._policy_shards.checksums(self._dtype))  # [1 + engines, names]
        expected, before, self._before = sums[0] * self._copies, self._before, sums[0]  # [names] each
        differs = sums[1:] != expected  # [engines, names]
        found = differs.any(0).nonzero()[:, 0].tolist()
        factors = self._factors() if found else {}
        wrong = {}
        for number in found:
            name, theirs = self._names[number], sums[1:, number][differs[:, number]]  # of the engines that differ
            if not theirs.any():
                wrong[name] = MISSING
            elif before is not None and (theirs == before[number] * self._copies[number]).all():
                wrong[name] = STALE
            else:
                wrong[name] = f"{SCALED} {factors[name]:.3g}" if name in factors else OTHER_VALUES
        wrong |= {name: MISSING for name, number in zip(self._names, self._copies.tolist(), strict=True) if not number}
        wrong |= {name: NOT_SENT for name in self._names if name not in sent}
        return [f"{name} {fault}" for name, fault in wrong.items()]

    def _factors(self) -> dict[str, float]:
        """Returns the factor c of each tensor that is c times the policy's in an engine. Collective."""
        sums = self._sums(self._policy_shards.moments(self._dtype), moments)  # [1 + engines, names, 2]
        copies, found = self._copies[:, None].clamp(min=1), {}
        for engine in sums[1:] / copies / sums[0]:  # [names, 2], c and c² of each
            c, square = engine.unbind(-1)
            consistent = ((c - 1).abs() > 1e-4) & ((square / c.square() - 1).abs() < 1e-2)
            found |= {self._names[number]: float(c[number]) for number in consistent.nonzero()[:, 0].tolist()}
        return found


def moments(matrix: Tensor, weights: Tensor, *, first_column: int = 0) -> Tensor:
    """Returns (a projection on pseudo-random numbers, Σ x²) for each row of `weights`, [k, 2] float64. They add up over parts.

    If every element is multiplied by c, the first is multiplied by c and the second by c². The arguments are those of
    `checksum.checksums`.
    """
    values = matrix[:, None].flatten(1).double()  # [rows, columns]
    columns = place_weights(-1 - torch.arange(first_column, first_column + values.shape[1], device=matrix.device))
    projected = (weights.double() / 2**63) @ (values @ (columns.double() / 2**63))  # [k]
    return torch.stack([projected, (weights != 0).double() @ values.square().sum(1)], dim=-1)
