"""Proof that an adapter arrived: A and B of every adapted layer, compared at every push."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn

from torchtitan_rl.sync.weight_proof import WeightProof

NO_PLACE = "has no place in the engine"


class AdapterProof(WeightProof):
    """Compares the adapters in this rank's engine with the policy's. `policy_shards` is an AdapterChecksums."""

    def parameters(self, model: nn.Module) -> Iterator[tuple[Any, str, dict[str, int], int]]:
        """Yields this rank's A and B of every adapted layer. A slice of a fused layer without an adapter has none."""
        fused = getattr(model, "packed_modules_mapping", {})
        for path, layer in model.lora_manager.modules.items():
            parent, _, last = path.rpartition(".")
            for part, one in enumerate(fused.get(last, [last])):
                for letter, stack in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                    name, matrix = (
                        f"{parent}.{one}.lora_{letter}.weight",
                        stack[part][0, 0],
                    )  # of the only adapter
                    if name in self._policy_shards.shapes:
                        yield (
                            SimpleNamespace(weight=matrix),
                            "weight",
                            {name: len(matrix)},
                            matrix.shape[1],
                        )

    def adapter_faults(self, sent: Collection[str]) -> list[str]:
        """Returns one sentence per fault after a push, each beginning with the tensor's name. Collective.

        Args:
            sent: names of the tensors that were sent.
        """
        wrong = self.faults(sent)
        wrong |= {
            name: NO_PLACE
            for name, number in zip(self._names, self._copies.tolist(), strict=True)
            if not number
        }
        return [f"{name} {fault}" for name, fault in wrong.items()]
