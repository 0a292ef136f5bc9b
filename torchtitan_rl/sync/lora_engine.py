"""The policy's adapter in the vLLM engine: started with room for it, and replaced in place at each push."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_rl.device import ON_CPU
from torchtitan_rl.generator.patches import apply_adapter_at_once
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_layers import MATRICES
from torchtitan_rl.sync.lora_proof import AdapterProof

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's maximum ranks. Its buffers have the smallest one that holds the adapter, padded with zeros."""

NUMBER = 1
"""vLLM's id of the one adapter."""


def room_for(rank: int) -> int:
    """Returns the rank of the engine's buffers for adapters of `rank`."""
    return next(room for room in RANKS if room >= rank)


class EngineAdapter:
    """The adapter of this rank's engine."""

    def __init__(self, lora: Lora, *, tp_size: int, dtype: torch.dtype) -> None:
        """
        Args:
            lora: attached to the policy.
            tp_size, dtype: the engine's.
        """
        self.lora = lora
        self._proof_settings = {
            "policy_shards": lora.policy_shards,
            "tp_size": tp_size,
            "dtype": dtype,
        }
        self._proof: AdapterProof | None = None

    def engine_options(self) -> dict[str, Any]:
        """Returns keyword arguments of `vllm.LLM`. Only the targets get LoRA layers: vLLM would wrap the head too."""
        room = room_for(self.lora.config.rank)
        targets = {
            name for target in self.lora.config.targets for name in (target, *MATRICES[target])
        }
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": room,
            "lora_target_modules": sorted(targets),
        }

    def request(self) -> "LoRARequest":
        """Returns the LoRA request of every sampling request. vLLM finds the adapter by its id and opens no path."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", NUMBER, "in-process")

    def load(self, llm: "LLM", tensors: dict[str, Tensor]) -> None:
        """Replace the adapter of this rank's engine.

        Args:
            tensors: full tensors by `Lora.weights`' names, in the engine's dtype. Those of B are overwritten.
        """
        llm.apply_model(partial(self._replace, tensors=tensors))
        if self._proof is None:
            if ON_CPU:
                llm.apply_model(apply_adapter_at_once)
            self._proof = llm.apply_model(partial(AdapterProof, **self._proof_settings))[0]

    def _replace(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Write into the engine's buffers, so captured CUDA graphs stay valid."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        config, loras = self.lora.config, {}
        for layer in {name.rpartition(".lora_")[0] for name in tensors}:
            a, b = (tensors.get(f"{layer}.lora_{one}.weight") for one in "AB")
            if a is not None and b is not None:  # otherwise the proof says what was not sent
                loras[layer] = LoRALayerWeights(
                    layer, config.rank, config.alpha, a, b, scaling=self.lora.scale
                )
        manager = model.lora_manager
        manager.remove_adapter(NUMBER)
        if loras:
            manager.add_adapter(LoRAModel(NUMBER, config.rank, loras))  # multiplies B by the scale
            manager.activate_adapter(NUMBER)

    def faults(self, sent: Collection[str]) -> list[str]:
        """Returns one sentence for each fault of the adapter in the engine: see `AdapterProof.adapter_faults`. Collective."""
        return self._proof.adapter_faults(sent)
