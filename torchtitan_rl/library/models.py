"""Models: torchtitan's dense decoders, built from what a Hugging Face config.json says, and back to transformers' own.

docs/models.md says what another architecture needs: an entry in FAMILIES.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm, RoPE, TransformerBlock
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock, parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, Qwen3TransformerBlock, model_registry, parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_rl.core.errors import UserError, expect

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LINEAR_INIT = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_NORM_INIT = {"weight": nn.init.ones_}

QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
"""The published dense ones that torchtitan has."""


class Qwen2StateDictAdapter(Qwen3StateDictAdapter):
    """Qwen3's names, and those of the biases of query, key and value."""

    def __init__(self, model_config: Decoder.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{one}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{one}.bias"
            for one in "qkv"
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What torchtitan's parts make of one of transformers' architectures."""

    name: str
    model_type: str
    """transformers' name of it."""
    model: type[Decoder.Config]
    block: type[TransformerBlock.Config]
    rope: type[RoPE.Config]
    parallelize: Callable
    adapter: type[StateDictAdapter]
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    qkv_bias: bool = False
    heads_split_hidden: bool = False
    """Whether vLLM ignores a head_dim in its config.json."""
    rope_types: tuple[str, ...] = ("default",)
    """The ways of stretching positions that `rope` computes as transformers and vLLM do."""
    must_be: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of its config.json that change the computation, and the one value that is implemented."""


_QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    model=Qwen3Model.Config,
    block=Qwen3TransformerBlock.Config,
    rope=CosSinRoPE.Config,
    parallelize=parallelize_qwen3,
    adapter=Qwen3StateDictAdapter,
    qk_norm=True,
    must_be={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
)
_QWEN2 = dataclasses.replace(
    _QWEN3,
    name="qwen2",
    model_type="qwen2",
    adapter=Qwen2StateDictAdapter,
    qk_norm=False,
    qkv_bias=True,
    heads_split_hidden=True,
    must_be={"hidden_act": "silu", "use_sliding_window": False},
)
_LLAMA = Family(
    name="llama3",
    model_type="llama",
    model=Llama3Model.Config,
    block=Llama3TransformerBlock.Config,
    rope=ComplexRoPE.Config,
    parallelize=parallelize_llama,
    adapter=Llama3StateDictAdapter,
    rope_types=("default", "llama3"),
    must_be={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
FAMILIES = {"Qwen3ForCausalLM": _QWEN3, "Qwen2ForCausalLM": _QWEN2, "LlamaForCausalLM": _LLAMA}
"""By the name in a config.json's `architectures`."""

_ROPE_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""Llama 3's, as config.json and as torchtitan call them."""


def spec_from_folder(folder: Path) -> ModelSpec:
    """The model that the config.json of a checkpoint folder describes.

    Raises:
        UserError: naming `hf_assets_path`, where it cannot be read or describes what is not implemented.
    """
    found = _read_config(folder)
    architecture = (found.architectures or [found.model_type])[0]
    expect(
        architecture in FAMILIES, "hf_assets_path", str(folder),
        f"a checkpoint of one of {', '.join(FAMILIES)}, but its config.json says {architecture}",
        "docs/models.md says what another architecture needs.",
    )  # fmt: skip
    family, rope = FAMILIES[architecture], found.rope_parameters
    must_be = {**family.must_be, "quantization_config": None}
    differing = [f"{key} {value!r}" for key, only in must_be.items() if (value := getattr(found, key, only)) != only]
    split = found.hidden_size // found.num_attention_heads
    head_dim = getattr(found, "head_dim", None) or split
    if family.heads_split_hidden and head_dim != split:
        differing.append(f"head_dim {head_dim}, not hidden_size / num_attention_heads, which vLLM takes")
    if rope["rope_type"] not in family.rope_types:
        differing.append(f"rope_type {rope['rope_type']!r}")
    expect(
        not differing, "hf_assets_path", str(folder),
        f"a {architecture} as torchtitan computes it, but its config.json has {', '.join(differing)}",
        "Use a checkpoint without it.",
    )  # fmt: skip
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("intermediate_size", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings")
    return _spec(
        family,
        **{key: getattr(found, key) for key in keys},
        head_dim=head_dim,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope if rope["rope_type"] == "llama3" else None,
    )


def _read_config(folder: Path) -> "PretrainedConfig":
    """transformers' own reading, which fills in what an older or shorter config.json leaves out."""
    from transformers import AutoConfig

    field = f"hf_assets_path = {str(folder)!r}"
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{field}: its config.json is no JSON: {error}. Download the checkpoint again.") from error
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: unknown model types, wrong types of values
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{field}: transformers cannot read its config.json: {first}. Correct it.") from error


def _spec(
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
) -> ModelSpec:
    """A decoder of a family; the arguments are config.json's entries."""
    dim = hidden_size
    rope = family.rope(dim=head_dim, max_seq_len=max_position_embeddings, theta=float(rope_theta))
    if rope_scaling:
        scaling = {ours: rope_scaling[theirs] for theirs, ours in _ROPE_SCALING.items()}
        rope = dataclasses.replace(rope, scaling="llama", **scaling)

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=rms_norm_eps, param_init=_NORM_INIT)

    def layer() -> TransformerBlock.Config:
        attention = make_gqa_config(
            dim=dim,
            n_heads=num_attention_heads,
            n_kv_heads=num_key_value_heads,
            head_dim=head_dim,
            wqkv_param_init=_LINEAR_INIT,
            wo_param_init=_LINEAR_INIT,
            inner_attention=get_attention_config("varlen"),
            fuse_qkv=True,
            rope=rope,
            qk_norm=norm(head_dim) if family.qk_norm else None,
        )
        attention.qkv_linear.wqkv.bias = family.qkv_bias
        feed_forward = make_ffn_config(
            dim=dim, hidden_dim=intermediate_size, w1_param_init=_LINEAR_INIT, w2w3_param_init=_LINEAR_INIT
        )
        return family.block(
            attention=attention, feed_forward=feed_forward, attention_norm=norm(dim), ffn_norm=norm(dim)
        )

    embedding_init = {"weight": skip_param_init} if tie_word_embeddings else _LINEAR_INIT
    return ModelSpec(
        name=family.name,
        flavor=f"{num_hidden_layers}x{dim}",
        model=family.model(
            vocab_size=vocab_size,
            dim=dim,
            norm=norm(dim),
            enable_weight_tying=tie_word_embeddings,
            tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding_init),
            lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_LINEAR_INIT),
            layers=[layer() for _ in range(num_hidden_layers)],
        ),
        parallelize_fn=family.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=family.adapter,
    )


def qwen3(flavor: str) -> ModelSpec:
    """torchtitan's Qwen3 of one of QWEN3_SIZES. Raises UserError for another."""
    expect(flavor in QWEN3_SIZES, "model_spec", flavor, f"a size of dense Qwen3, one of {QWEN3_SIZES}", "Use one.")
    return model_registry(flavor, attn_backend="varlen")


def small_qwen3(
    *,
    vocab_size: int,
    dim: int = 256,
    n_layers: int = 4,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    hidden_dim: int = 512,
    max_seq_len: int = 512,
    rope_theta: float = 10000.0,
) -> ModelSpec:
    """A Qwen3 with tied embeddings and any dimensions; the defaults have 2.4 million parameters and a small vocabulary."""
    return _spec(
        _QWEN3,
        vocab_size=vocab_size,
        hidden_size=dim,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=head_dim,
        intermediate_size=hidden_dim,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=rope_theta,
        max_position_embeddings=max_seq_len,
    )


def hf_architecture(config: Decoder.Config) -> dict[str, Any]:
    """The entries of a Hugging Face config.json that describe this dense model's architecture."""
    layer = config.layers[0]
    attention = layer.attention
    rope = attention.rope
    entries = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "tie_word_embeddings": config.enable_weight_tying,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta,
    }
    if rope.scaling == "llama":
        scaling = {theirs: getattr(rope, ours) for theirs, ours in _ROPE_SCALING.items()}
        entries["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return entries


def new_hf_model(spec: ModelSpec, **settings: Any) -> "PreTrainedModel":
    """transformers' model of a spec of this page, with random weights from torch's generator, in the default dtype.

    Args:
        settings: further entries of its config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    [model_type] = [family.model_type for family in FAMILIES.values() if family.name == spec.name]
    entries = {"max_position_embeddings": spec.model.max_seq_len, **hf_architecture(spec.model), **settings}
    config = AutoConfig.for_model(model_type, **entries)
    # For short sequences plain matrix products are a fifth faster than the CPU's flash attention.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
