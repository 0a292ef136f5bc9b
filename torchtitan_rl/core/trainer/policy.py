"""Builds the policy: torchtitan's model for this device, sharded over the ranks, with a head that scores tokens."""

import dataclasses
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.utils import set_default_dtype

from torchtitan_rl.core.device import DEVICE_TYPE, adapt_fsdp
from torchtitan_rl.core.events import progress
from torchtitan_rl.core.trainer.attention import attention_config, describe_attention
from torchtitan_rl.core.trainer.score import LogprobHead

AC_CLASSES = {"none": None, "auto": None, "selective": SelectiveAC, "full": FullAC}


def build_policy(
    model_spec: ModelSpec,
    config: Decoder.Config,
    *,
    parallel_dims: ParallelDims,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    compile_config: CompileConfig,
    activation_checkpoint: str,
    dump_folder: str,
) -> Decoder:
    """Returns the sharded model with random weights.

    Args:
        config: of `model_config`, with or without adapters.
        training: dtype, mixed_precision_param, and seq_len, the longest sequence, which sizes the RoPE cache.
        compile_config: of the transformer blocks.
        activation_checkpoint: a key of AC_CLASSES.
    """
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = config.build()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            # A base below adapters has the forward's dtype: no optimizer needs more digits of it.
            parameter.data = parameter.data.to(TORCH_DTYPE_MAP[training.mixed_precision_param])
    if compile_config.enable:
        # KL, batches without a backward and selective checkpointing alone make 7 variants of a block; torch allows 8.
        torch.compiler.config.recompile_limit = 64
    progress(describe_attention(config.layers[0].attention.inner_attention))
    ac_class = AC_CLASSES[activation_checkpoint]
    model = model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=ac_class.Config() if ac_class else None,
        dump_folder=dump_folder,
    )
    adapt_fsdp(model)
    model.to_empty(device=DEVICE_TYPE)
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # also makes the RoPE caches
    model.train()
    return model


def defer_reduction(model: Decoder, defer: bool) -> None:
    """With `defer`, the next backward keeps weights gathered and leaves the reduction of gradients to a later one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not defer, recurse=False)
            module.set_requires_gradient_sync(not defer, recurse=False)


def model_config(
    model_spec: ModelSpec,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    logprob_chunk_tokens: int,
    compile_head: bool,
    share_prompts_from: int = 0,
) -> Decoder.Config:
    """Returns a copy of the model's config with this device's attention, the scoring head and the RoPE length."""
    layers = [dataclasses.replace(layer) for layer in model_spec.model.layers]
    config = dataclasses.replace(model_spec.model, layers=layers)
    inner = attention_config(
        float32=training.mixed_precision_param == "float32", share_prompts_from=share_prompts_from
    )
    for layer in layers:
        rope = dataclasses.replace(layer.attention.rope, max_seq_len=training.seq_len)
        layer.attention = dataclasses.replace(layer.attention, inner_attention=inner, rope=rope)
    head: dict[str, object] = {}
    for declared in dataclasses.fields(config.lm_head):
        head[declared.name] = getattr(config.lm_head, declared.name)
    config.lm_head = LogprobHead.Config(
        **head, chunk_tokens=logprob_chunk_tokens, compile=compile_head
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
    # The head reduces over the sharded vocabulary itself and returns plain tensors.
    sharding = config.lm_head.sharding_config
    config.lm_head.sharding_config = ShardingConfig(
        state_shardings=sharding.state_shardings,
        in_src_shardings=sharding.in_src_shardings,
        in_dst_shardings=sharding.in_dst_shardings,
    )
    return config
