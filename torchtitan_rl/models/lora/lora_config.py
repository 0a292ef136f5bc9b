"""The settings of LoRA (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with W frozen."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_rl.fields.number import number

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
