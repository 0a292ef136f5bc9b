"""The policy's adapters: added to the model, started, turned off for the reference, and named as peft names them."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.models.hf import blocks_of, gather, local_shard, rows_of
from torchtitan_rl.models.hf_decoder import HFDecoder
from torchtitan_rl.models.lora.lora_config import LoraConfig, is_adapter
from torchtitan_rl.models.lora.lora_layers import MATRICES


class Lora:
    """The adapters of one policy."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self.scale = config.alpha / config.rank

    @classmethod
    def of(cls, config: LoraConfig) -> "Lora | None":
        """Returns the adapters of a config; None for rank 0."""
        return cls(config) if config.rank else None

    def convert(self, config: Decoder.Config) -> Decoder.Config:
        """Returns a copy of the model's config with frozen weights and an adapter at each target."""
        if isinstance(config, HFDecoder.Config):
            return dataclasses.replace(config, lora=self.config)
        config = copy.deepcopy(config)  # the converter writes into it
        layers = config.traverse(Linear.Config, recurse=True)
        linear = {fqn.rpartition(".")[2] for fqn, *_ in layers}
        names = {name for target in self.config.targets for name in MATRICES[target].torchtitan}
        settings = LoRAConverter.Config(
            rank=self.config.rank, alpha=self.config.alpha, target_modules=sorted(names & linear)
        )
        return settings.build().convert(config)

    def attach(self, model: Decoder, state_dict_adapter: BaseStateDictAdapter) -> None:
        """Start the adapters of the loaded model, and remember their exported names."""
        self._exported = list(adapter_rows(model, state_dict_adapter))
        start_adapters(model)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (peft's name without its prefix, full tensor in `dtype`) for the A and B of every adapter. Collective.

        Example: ("model.layers.0.self_attn.q_proj.lora_A.weight", [rank, 1024])
        """
        for parameter, exported in self._exported:
            whole = gather(parameter.detach(), dtype)
            yield from ((name, whole[rows.to(whole.device)]) for name, rows in exported.items())

    @contextmanager
    def off(self, model: nn.Module) -> Iterator[None]:
        """Within this context the model computes with its base alone."""
        layers = [module for module in model.modules() if hasattr(module, "lora_a")]
        try:
            for layer in layers:
                layer._lora_scaling = 0.0
            yield
        finally:
            for layer in layers:
                layer._lora_scaling = self.scale


@torch.no_grad()
def start_adapters(model: nn.Module) -> None:
    """Set every A to uniform random numbers below 1 / sqrt(its columns), as peft does, and every B to 0.

    The numbers depend on the parameter's name alone, not on seed or sharding.
    """
    for name, parameter in model.named_parameters():
        if ".lora_b." in name:
            local_shard(parameter).zero_()
        elif ".lora_a." in name:
            seed = int.from_bytes(sha256(canonical_fqn(name).encode()).digest()[:7])
            random = torch.Generator().manual_seed(seed)
            numbers = torch.empty(parameter.shape).uniform_(-1, 1, generator=random)
            whole = numbers / parameter.shape[1] ** 0.5
            local_shard(parameter).copy_(own_part(whole, parameter))


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns the part of a matrix that this rank's shard of `parameter` holds."""
    if not isinstance(parameter, DTensor):
        return whole
    [chunk] = parameter.__create_chunk_list__()
    return whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]


def adapter_rows(
    model: Decoder, state_dict_adapter: BaseStateDictAdapter
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields each adapter's parameter with its rows under each of its names, as `exported_rows` does for the base.

    A fused layer's A comes whole under the name of each of its parts. Its B is split as the layer's weight is, which for
    Llama also changes the order of rows.
    """
    for prefix, block in blocks_of(model):
        for name, parameter in block.named_parameters():
            if not is_adapter(name):
                continue
            layer, _, letter = name.removesuffix(".weight").rpartition(".lora_")
            weight = block.get_parameter(f"{layer}.weight")
            exported = rows_of(model, state_dict_adapter, prefix, block, f"{layer}.weight", weight)
            named: dict[str, Tensor] = {}
            for hf_name, own in exported.items():
                rows = torch.arange(len(parameter)) if letter == "a" else own
                named[f"{hf_name.removesuffix('weight')}lora_{letter.upper()}.weight"] = rows
            yield parameter, named
