"""Conversion between a Hugging Face config.json and the policy's model.

Families in FAMILIES run with torchtitan's modules. Any other dense decoder, and a family's model with a RoPE, windows or biases
that torchtitan's modules lack, runs with transformers' own: see hf_decoder.py for the model and hf_support.py for what is refused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm, TransformerBlock
from torchtitan.models.common.attention import GQAttention, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.models.families import (
    FAMILIES,
    QWEN3_MOE,
    Family,
    beyond_torchtitan,
    unlike_vllm,
)
from torchtitan_rl.models.hf_decoder import HFDecoder, HFStateDictAdapter, parallelize_hf
from torchtitan_rl.models.hf_support import Unsupported, examine
from torchtitan_rl.models.mixture_of_experts import MixtureOfExperts, mixture_entries
from torchtitan_rl.models.multimodal import MULTIMODAL, text_of
from torchtitan_rl.models.score import LogprobHead
from torchtitan_rl.text import without_code_advice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LOADED = {"weight": skip_param_init, "bias": skip_param_init}
"""No random start: every weight is read from a folder."""

_ROPE_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""Llama 3's RoPE scaling: {name in config.json: name in torchtitan}."""


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
"""Entries of config.json that every decoder has."""


def spec_from_folder(folder: Path) -> ModelSpec:
    """Returns the model that a checkpoint folder's config.json describes.

    Raises:
        UserError: naming `hf_assets_path`, if config.json cannot be read, contradicts itself or describes an unsupported model.
    """
    config = _config_of(folder)
    architecture = (config.architectures or [config.model_type])[0]
    family = FAMILIES.get(architecture)
    if architecture in MULTIMODAL and "text_config" in config.sub_configs:
        text = text_of(config, folder)
        return _transformers_spec(folder, text, text.architectures[0], part_of=architecture)
    if family is None:
        return _transformers_spec(folder, config, architecture)
    expect(
        config.model_type == family.model_type, "hf_assets_path", str(folder),
        f"one model, but its config.json has architectures {architecture}, by which vLLM goes, and model_type {config.model_type!r}, "
        f"by which transformers goes ({architecture} is of model_type {family.model_type!r})",
        "Correct the entry that is wrong.",
    )  # fmt: skip
    refused = unlike_vllm(config, family)
    expected = f"a {architecture} that vLLM computes as transformers does, but its config.json has"
    expected += f" {', '.join(refused)}"
    expect(not refused, "hf_assets_path", str(folder), expected, "Use another checkpoint.")
    if beyond_torchtitan(config, family):
        return _transformers_spec(folder, config, architecture)
    rope = config.rope_parameters
    return decoder_spec(
        family,
        **_sizes(config, folder),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope if rope["rope_type"] == "llama3" else None,
        mixture=MixtureOfExperts.of(config) if family is QWEN3_MOE else None,
    )


def _config_of(folder: Path) -> "PretrainedConfig":
    """Reads config.json with transformers, which fills in missing entries of an older or shorter file."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many types, for unknown model types and for wrong types of values
        reason = without_code_advice(str(error).strip().split("\n\n")[0]) or type(error).__name__
        raise UserError(
            f"hf_assets_path = {str(folder)!r}: transformers cannot read its config.json: {reason.rstrip('.')}. Correct it."
        ) from error


def _sizes(config: "PretrainedConfig", folder: Path) -> dict[str, Any]:
    """Returns a decoder's sizes as arguments of `decoder_spec`. Raises UserError for heads that cannot be."""
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    expected = f"heads that num_key_value_heads divides, but its config.json has {heads} heads and num_key_value_heads {key_value_heads}"
    remedy = "Correct it."
    holds = key_value_heads > 0 and heads % key_value_heads == 0
    expect(holds, "hf_assets_path", str(folder), expected, remedy)
    return {
        **{name: getattr(config, name) for name in _SIZES},
        "num_key_value_heads": key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _transformers_spec(
    folder: Path, config: "PretrainedConfig", architecture: str, part_of: str = ""
) -> ModelSpec:
    """Returns any other dense decoder, with transformers' modules: see `HFDecoder.Config.part_of`."""
    try:
        examined = examine(config, architecture)
    except Unsupported as reason:
        raise UserError(
            f"hf_assets_path = {str(folder)!r}: expected a dense decoder, but its config.json says {architecture}, and {reason}. "
            "See docs/models.md."
        ) from reason
    family = Family(
        name=config.model_type,
        model_type=config.model_type,
        model=partial(HFDecoder.Config, hf=config, part_of=part_of, **examined),
        block=Qwen3TransformerBlock.Config,
        rope=CosSinRoPE.Config,
        parallelize=parallelize_hf,
        adapter=HFStateDictAdapter,
    )
    return decoder_spec(family, **_sizes(config, folder), rms_norm_eps=0.0, rope_theta=1.0)


def decoder_spec(
    family: Family,
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    intermediate_size: int,
    tie_word_embeddings: bool,
    rms_norm_eps: float,
    rope_theta: float,
    max_position_embeddings: int,
    rope_scaling: Mapping[str, Any] | None = None,
    mixture: MixtureOfExperts | None = None,
) -> ModelSpec:
    """Returns a decoder of the family. The arguments are config.json's entries. `mixture`: of layers that are not dense."""
    dim = hidden_size
    rope = family.rope(dim=head_dim, max_seq_len=max_position_embeddings, theta=float(rope_theta))
    if rope_scaling:
        scaling = {ours: rope_scaling[theirs] for theirs, ours in _ROPE_SCALING.items()}
        rope = replace(rope, scaling="llama", **scaling)
    norm = partial(RMSNorm.Config, eps=rms_norm_eps)
    make_attention = partial(
        make_gqa_config,
        dim=dim,
        n_heads=num_attention_heads,
        n_kv_heads=num_key_value_heads,
        head_dim=head_dim,
        rope=rope,
    )
    layers: list[TransformerBlock.Config] = []
    for number in range(num_hidden_layers):
        layer = _layer(family, make_attention, norm, dim=dim, head_dim=head_dim)
        if mixture is None or number in mixture.dense:
            inits = {"w1_param_init": _LOADED, "w2w3_param_init": _LOADED}
            layer.feed_forward = make_ffn_config(dim=dim, hidden_dim=intermediate_size, **inits)
        else:
            layer.moe = mixture.config(dim)
        layers.append(layer)
    embedding = partial(Embedding.Config, num_embeddings=vocab_size, embedding_dim=dim)
    head = partial(LogprobHead.Config, in_features=dim, out_features=vocab_size)
    return ModelSpec(
        name=family.name,
        flavor=f"{num_hidden_layers}x{dim}",
        model=family.model(
            vocab_size=vocab_size,
            dim=dim,
            norm=norm(normalized_shape=dim),
            enable_weight_tying=tie_word_embeddings,
            tok_embeddings=embedding(param_init=_LOADED),
            lm_head=head(param_init=_LOADED),
            layers=layers,
        ),
        parallelize_fn=family.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=family.adapter,
    )


def _layer(
    family: Family,
    make_attention: Callable[..., GQAttention.Config],
    norm: Callable[..., RMSNorm.Config],
    *,
    dim: int,
    head_dim: int,
) -> TransformerBlock.Config:
    """Returns the config of one block, still without its MLP or mixture of experts."""
    attention = make_attention(
        wqkv_param_init=_LOADED,
        wo_param_init=_LOADED,
        inner_attention=VarlenAttention.Config(),
        fuse_qkv=True,
        qk_norm=norm(normalized_shape=head_dim) if family.qk_norm else None,
    )
    attention.qkv_linear.wqkv.bias = family.qkv_bias
    return family.block(
        attention=attention,
        attention_norm=norm(normalized_shape=dim),
        ffn_norm=norm(normalized_shape=dim),
    )


def hf_architecture(config: Decoder.Config) -> dict[str, Any]:
    """Returns the Hugging Face config.json entries that describe this model."""
    if isinstance(config, HFDecoder.Config):
        return _transformers_entries(config)
    attention = config.layers[0].attention
    rope = attention.rope
    dense = [layer.feed_forward for layer in config.layers if layer.feed_forward is not None]
    width = {"intermediate_size": dense[0].w1.out_features} if dense else {}
    entries = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim,
        **width,
        "tie_word_embeddings": config.enable_weight_tying,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta,
        **mixture_entries(config.layers),
    }
    if rope.scaling == "llama":
        scaling = {theirs: getattr(rope, ours) for theirs, ours in _ROPE_SCALING.items()}
        entries["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return entries


_NOT_COMPUTED = (
    "architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache", "_name_or_path",
)  # fmt: skip
"""Entries of config.json that no log-probability depends on."""


def _transformers_entries(config: HFDecoder.Config) -> dict[str, Any]:
    """Returns config.json without entries that affect no computation. Sizes have the usual names."""
    entries = {key: value for key, value in config.hf.to_dict().items() if key not in _NOT_COMPUTED}
    attention = config.first_attention
    sizes = {"num_key_value_heads": attention.n_kv_heads, "head_dim": attention.head_dim}
    return json.loads(json.dumps(entries | sizes, default=str))
