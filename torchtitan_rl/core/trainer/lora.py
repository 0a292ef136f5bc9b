"""LoRA (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with W frozen and only A and B trained."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from torchtitan_rl.core.config import number
from torchtitan_rl.core.trainer.norms import local_shard

TARGETS = {
    "qkv_proj": {"wqkv", "wq", "wk", "wv"},
    "o_proj": {"wo"},
    "gate_proj": {"w1"},
    "up_proj": {"w3"},
    "down_proj": {"w2"},
}
"""torchtitan's names of each target's matrices. Query, key and value are one matrix, so they share one A."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Which adapters are trained. The base keeps the start's values and is never merged with them."""

    rank: int = number(0, least=0, most=512, remedy="Use 32; 0 trains all weights.")
    """Rows of A and columns of B. 0: no adapters, all weights are trained."""

    alpha: float = number(32.0, above=0, remedy="Use 32.")
    """The adapter's output is multiplied by alpha / rank."""

    targets: tuple[Literal["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = tuple(TARGETS)
    """The matrices of each layer that have an adapter."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 1.0


def with_adapters(config: Decoder.Config, lora: LoraConfig) -> Decoder.Config:
    """Returns a copy of the model's config with frozen weights and an adapter at each target."""
    config = copy.deepcopy(config)  # the converter writes into it
    linear = {fqn.rpartition(".")[2] for fqn, *_ in config.traverse(Linear.Config, recurse=True)}
    names = linear & set().union(*(TARGETS[target] for target in lora.targets))
    return LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=sorted(names)).build().convert(config)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name, in torchtitan's or Hugging Face's form, is one of an adapter."""
    return ".lora_" in name


def cast_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the frozen weights `dtype`, the forward's, because no optimizer needs more digits of them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def start_adapters(model: nn.Module) -> None:
    """Set every A to uniform random numbers below 1 / sqrt(its columns), as peft does, and every B to 0.

    The numbers depend on the parameter's name alone, not on seed or sharding.
    """
    for name, parameter in model.named_parameters():
        if ".lora_b." in name:
            local_shard(parameter).zero_()
        elif ".lora_a." in name:
            seed = int.from_bytes(sha256(name.replace("_checkpoint_wrapped_module.", "").encode()).digest()[:7])
            random = torch.Generator().manual_seed(seed)
            whole = torch.empty(parameter.shape).uniform_(-1, 1, generator=random) / parameter.shape[1] ** 0.5
            local_shard(parameter).copy_(own_part(whole, parameter))


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns the part of a matrix that this rank's shard of `parameter` holds."""
    if not isinstance(parameter, DTensor):
        return whole
    [chunk] = parameter.__create_chunk_list__()
    return whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within this context the model computes with its base alone."""
    layers = [module for module in model.modules() if hasattr(module, "lora_a")]
    scales = [layer._lora_scaling for layer in layers]
    try:
        for layer in layers:
            layer._lora_scaling = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer._lora_scaling = scale
