"""The settings of LoRA (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with W frozen. models/lora does
the work."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from torchtitan_rl.fields.number import number

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

Target = Literal["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Which adapters are trained. The base keeps the start's values and is never merged with them."""

    rank: int = number(0, least=0, most=512, remedy="Use 32; 0 trains all weights.")
    """Rows of A and columns of B. 0: no adapters, all weights are trained."""

    alpha: float = number(32.0, above=0, remedy="Use 32.")
    """The adapter's output is multiplied by alpha / rank."""

    targets: tuple[Target, ...] = get_args(Target)
    """The matrices of each layer that have an adapter. Query, key and value of Qwen and Llama are one matrix and share
    one A."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in torchtitan's or Hugging Face's form, is one of an adapter."""
    return ".lora_" in name


class PolicyLora(Protocol):
    """The policy's LoRA adapters: `models.lora.adapters.Lora`."""

    def convert(self, config: "Decoder.Config") -> "Decoder.Config":
        """A copy of the model's config with frozen weights and adapters."""

    def attach(self, model: "Decoder", state_dict_adapter: "BaseStateDictAdapter") -> None:
        """Start the adapters of the loaded model."""

    def weights(self, dtype: "torch.dtype") -> "Iterator[tuple[str, Tensor]]":
        """Yields (name, full tensor in `dtype`) for every matrix of the adapters. Collective."""

    def off(self, model: "nn.Module") -> AbstractContextManager[None]:
        """Within this context the model computes with its base alone."""
