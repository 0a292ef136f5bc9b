"""The policy's adapter in the vLLM engine: started with room for it, and replaced in place at each push."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.models.lora.lora_layers import MATRICES

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's maximum ranks. Its buffers have the smallest one that holds the adapter, padded with zeros."""

NUMBER = 1
"""vLLM's id of the one adapter."""


def room_for(rank: int) -> int:
    """Returns the rank of the engine's buffers for adapters of `rank`."""
    return next(room for room in RANKS if room >= rank)


def lora_options(config: LoraConfig) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM`. Only the targets get LoRA layers: vLLM would wrap the head too."""
    targets = {
        name for target in config.targets for name in (target, *MATRICES[target].transformers)
    }
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room_for(config.rank),
        "lora_target_modules": sorted(targets),
    }


def lora_request() -> "LoRARequest":
    """Returns the LoRA request of every sampling request. vLLM finds the adapter by its id and opens no path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", NUMBER, "in-process")


def replace_adapter(model: nn.Module, tensors: dict[str, Tensor], lora: Lora) -> None:
    """Replace the adapter of this rank's engine. Its buffers stay in place, so captured CUDA graphs stay valid.

    Args:
        tensors: full tensors by `Lora.weights`' names, in the engine's dtype. Those of B are overwritten.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    config, layers = lora.config, {}
    for layer in {name.rpartition(".lora_")[0] for name in tensors}:
        a, b = (tensors.get(f"{layer}.lora_{letter}.weight") for letter in "AB")
        if a is not None and b is not None:  # otherwise the proof says what was not sent
            layers[layer] = LoRALayerWeights(
                layer, config.rank, config.alpha, a, b, scaling=lora.scale
            )
    manager = model.lora_manager
    manager.remove_adapter(NUMBER)
    if layers:
        manager.add_adapter(LoRAModel(NUMBER, config.rank, layers))  # multiplies B by the scale
        manager.activate_adapter(NUMBER)
