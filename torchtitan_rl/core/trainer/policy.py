"""Builds the policy: torchtitan's model for this device, sharded over the ranks, with a head that scores tokens."""

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor
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
from torchtitan_rl.core.trainer.attention import (
    attention_config,
    attention_masks,
    describe_attention,
)
from torchtitan_rl.core.trainer.divergence import TeacherOutput
from torchtitan_rl.core.trainer.experts import packed_moe, route
from torchtitan_rl.core.trainer.head import LogprobHead
from torchtitan_rl.core.types import SequenceLayout

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


def keep_weights(model: Decoder, keep: bool) -> None:
    """With `keep`, the next backward keeps weights gathered and leaves the reduction of gradients to a later one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not keep, recurse=False)
            module.set_requires_gradient_sync(not keep, recurse=False)


def model_config(
    model_spec: ModelSpec,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    logprob_chunk_tokens: int,
    compile_head: bool,
) -> Decoder.Config:
    """Returns a copy of the model's config with this device's attention, the scoring head, the RoPE length and experts
    for packed sequences."""
    layers = [dataclasses.replace(layer) for layer in model_spec.model.layers]
    config = dataclasses.replace(model_spec.model, layers=layers)
    inner = attention_config(float32=training.mixed_precision_param == "float32")
    for layer in layers:
        rope = dataclasses.replace(layer.attention.rope, max_seq_len=training.seq_len)
        layer.attention = dataclasses.replace(layer.attention, inner_attention=inner, rope=rope)
        layer.moe = layer.moe and packed_moe(layer.moe)
    head = {f.name: getattr(config.lm_head, f.name) for f in dataclasses.fields(config.lm_head)}
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


def score(
    model: Decoder,
    token_ids: Tensor,
    labels: Tensor,
    layout: SequenceLayout,
    temperature: float,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log pi(label) and entropy at the sampling temperature, [T] each, for packed tokens. One forward.

    Within the head's `comparing` the two values of a `Divergence` from the teacher follow, [T] each.

    Args:
        token_ids, labels: [T] int64.
        layout: the places of the sequences.
        at: [M] int64, the positions whose results are wanted; the others are 0 and take no work. None: all.
    """
    masks = attention_masks(model, layout)
    route(model, layout)
    with model.lm_head.scoring(labels, temperature, at):
        return model(token_ids[None], layout.positions[None], masks)  # [T] each


@torch.no_grad()
def score_only(
    model: Decoder,
    token_ids: Tensor,
    labels: Tensor,
    layout: SequenceLayout,
    temperature: float,
    at: Tensor | None = None,
) -> Tensor:
    """Returns log pi(label) as `score` does, [T], without a graph, and reshards all weights.

    FSDP2 keeps the embedding and the head gathered, in the forward's dtype, until a backward, which never comes here.
    They would take memory, and a checkpoint would store these rounded copies instead of the master weights. The next
    backward would gather the head once more, because FSDP2 still counts on a backward of this forward.
    """
    logprobs, _ = score(model, token_ids, labels, layout, temperature, at)
    model.reset_iter_state()
    return logprobs


@torch.no_grad()
def teacher_output(
    model: Decoder,
    token_ids: Tensor,
    labels: Tensor,
    layout: SequenceLayout,
    temperature: float,
    at: Tensor,
) -> TeacherOutput:
    """Returns what the divergence reads of a frozen model at the positions `at` [M]. Its head stays gathered until
    `model.reset_iter_state()`, so that the student's backward can read it."""
    with model.lm_head.teaching():
        output = score(model, token_ids, labels, layout, temperature, at)
    model.lm_head.unshard()  # with fsdp_reshard_after_forward "always" it is no longer gathered
    return output
