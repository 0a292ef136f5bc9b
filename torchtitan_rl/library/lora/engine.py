"""The policy's adapter in the vLLM engine: started with room for it, replaced in place, and read back for the proof."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchtitan_rl.core.trainer.lora import LoraConfig

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's maximum ranks. Its buffers have the smallest one that holds the adapter, padded with zeros."""

NUMBER = 1
"""vLLM's id of the one adapter."""


class EngineAdapter:
    """Implements the core's `generator.generator.Adapter` with vLLM's LoRA layers."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config

    def engine_options(self) -> dict[str, Any]:
        """Returns keyword arguments of `vllm.LLM`. Only the targets get LoRA layers: vLLM would wrap the head too."""
        room = next(rank for rank in RANKS if rank >= self.config.rank)
        targets = list(self.config.targets)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": targets}

    def request(self) -> "LoRARequest":
        """Returns what every request carries. vLLM finds the adapter by its id and opens no path."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", NUMBER, "in-process")

    def load(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Replace the adapter of this rank's engine in its buffers, so captured CUDA graphs stay valid.

        Args:
            tensors: full tensors by `adapter_weights`' names, in the engine's dtype. Those of B are overwritten.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        rank, alpha, loras = self.config.rank, self.config.alpha, {}
        for layer in {name.rpartition(".lora_")[0] for name in tensors}:
            a, b = (tensors.get(f"{layer}.lora_{one}.weight") for one in "AB")
            if a is not None and b is not None:  # otherwise the proof says what was not sent
                loras[layer] = LoRALayerWeights(layer, rank, alpha, a, b, scaling=self.config.scale)
        manager = model.lora_manager
        manager.remove_adapter(NUMBER)
        if loras:
            manager.add_adapter(LoRAModel(NUMBER, rank, loras))  # multiplies B by the scale
            manager.activate_adapter(NUMBER)

    def parameters(self, model: nn.Module, known: Collection[str]) -> Iterator[tuple[Any, str, dict[str, int], int]]:
        """Yields this rank's A and B of every adapted layer, as `weight_proof` wants them: (layer, name, rows, columns).

        Args:
            known: names of the policy's tensors. A slice of a fused layer without an adapter has none.
        """
        fused = model.packed_modules_mapping
        for path, layer in model.lora_manager.modules.items():
            parent, _, last = path.rpartition(".")
            for part, one in enumerate(fused.get(last, [last])):
                for letter, stack in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                    name, matrix = f"{parent}.{one}.lora_{letter}.weight", stack[part][0, 0]  # of the only adapter
                    if name in known:
                        yield SimpleNamespace(weight=matrix), "weight", {name: len(matrix)}, matrix.shape[1]


def engine_adapter(config: LoraConfig) -> EngineAdapter | None:
    """Returns the engine's part of the config's LoRA; None for rank 0."""
    return EngineAdapter(config) if config.rank else None
