"""The sharded policy in Hugging Face's layout: full weights, block by block."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl.models.lora.lora_config import is_adapter


def hf_weights(*args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields each (name, tensor) of `hf_blocks`."""
    return pairs(hf_blocks(*args, **options))


def pairs(blocks: Iterable[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the named tensors of all blocks."""
    return chain.from_iterable(block.items() for block in blocks)


@torch.no_grad()
def hf_blocks(
    model: Decoder,
    state_dict_adapter: BaseStateDictAdapter,
    dtype: torch.dtype,
    *,
    whole_blocks: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Yields {Hugging Face name: full tensor in `dtype`} of each block, without adapters. Tied weights come under both
    names.

    Collective: all ranks must iterate in step. Each tensor is cast before it is gathered. Only one block's tensors
    are held at a time: FSDP frees them when the next one is asked for, so copy what you keep.

    Args:
        whole_blocks: let FSDP gather a layer in one collective, as for a forward. Allowed only for the forward's dtype.
    """
    for prefix, block in blocks_of(model):
        if prefix == "lm_head." and model.enable_weight_tying:
            continue  # comes with the embedding
        with ExitStack() as after:
            if whole_blocks and prefix.startswith("layers."):
                block.unshard()
                after.callback(block.reshard)
            base = {name: p for name, p in block.named_parameters() if not is_adapter(name)}
            names = [canonical_fqn(prefix + name) for name in base]
            state = dict(zip(names, _full_tensors(list(base.values()), dtype), strict=True))
            yield to_hf(model, state_dict_adapter, prefix, block, state)


def to_hf(
    model: Decoder,
    state_dict_adapter: BaseStateDictAdapter,
    prefix: str,
    block: nn.Module,
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Returns one block's tensors under their Hugging Face names. Tied tensors come under both names."""
    for name, module in block.named_modules():
        # In place of torchtitan's state_dict hook, which gathers in the master dtype.
        if isinstance(module, FusedQKVLinear):
            begin = canonical_fqn(f"{prefix}{name}") + "."
            FusedQKVLinear._split_qkv_on_save(module, state, begin, {})
    weights = state_dict_adapter.to_hf(state)
    if model.enable_weight_tying and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def exported_rows(
    model: Decoder, adapter: BaseStateDictAdapter
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields each parameter that `hf_weights` exports, with the rows of the parameter under each of its names.

    Example: (parameter, {"model.embed_tokens.weight": tensor([0, 1, ...]), "lm_head.weight": tensor([0, 1, ...])})
    """
    for prefix, block in blocks_of(model):
        for name, parameter in block.named_parameters():
            if not is_adapter(name):
                yield parameter, rows_of(model, adapter, prefix, block, name, parameter)


def rows_of(
    model: Decoder,
    adapter: BaseStateDictAdapter,
    prefix: str,
    block: nn.Module,
    name: str,
    parameter: Tensor,
) -> dict[str, Tensor]:
    """Returns the rows of a block's parameter under each of its Hugging Face names."""
    numbers = torch.arange(len(parameter)).reshape(-1, *[1] * (parameter.ndim - 1))
    rows = numbers.expand(parameter.shape)
    exported = to_hf(model, adapter, prefix, block, {canonical_fqn(prefix + name): rows})
    return {name: rows.reshape(len(rows), -1)[:, 0] for name, rows in exported.items()}


def blocks_of(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Yields (prefix of its parameter names, module) for the embedding, each layer, the norm and the head."""
    for name, child in model.named_children():
        if name == "layers":
            yield from ((f"layers.{i}.", layer) for i, layer in child.named_children())
        else:
            yield f"{name}.", child


def _full_tensors(parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the full tensors in `dtype` on every rank. Those of one rank are cast by one launch. Collective."""
    is_sharded = any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in parameters)
    if is_sharded or all(p.dtype == dtype for p in parameters):
        return [gather(parameter, dtype) for parameter in parameters]
    shards = [local_shard(parameter) for parameter in parameters]
    cast = [torch.empty_like(shard, dtype=dtype) for shard in shards]
    torch._foreach_copy_(cast, shards)
    return cast


def gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the full tensor in `dtype` on every rank. Collective."""
    cast = parameter.detach().to(dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def local_shard(t: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, detached; the whole of a plain tensor."""
    if isinstance(t, DTensor):
        t = t.to_local()
    return t.detach()
