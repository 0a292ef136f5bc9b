"""The model families that run with torchtitan's modules, and the entries of config.json for which they do not, or vLLM's do not."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RoPE, TransformerBlock
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock, parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, Qwen3TransformerBlock, parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_rl.models.experts import PackedQwen3

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2StateDictAdapter(Qwen3StateDictAdapter):
    """Qwen3's parameter names, plus the biases of query, key and value."""

    def __init__(self, model_config: Decoder.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{one}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{one}.bias"
            for one in "qkv"
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The torchtitan parts that implement one architecture of transformers."""

    name: str
    model_type: str
    """The `model_type` in config.json."""
    model: Callable[..., Decoder.Config]
    block: type[TransformerBlock.Config]
    rope: type[RoPE.Config]
    parallelize: Callable
    adapter: type[StateDictAdapter]
    qk_norm: bool = False
    """Whether queries and keys are normalized."""
    qkv_bias: bool = False
    heads_split_hidden: bool = False
    """Whether vLLM ignores head_dim in config.json and uses hidden_size / num_attention_heads."""
    rope_types: tuple[str, ...] = ("default",)
    """RoPE types for which `rope` computes the same as transformers and vLLM."""
    native: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of config.json, each with the only value that torchtitan's modules compute. Others run with transformers' layers."""
    must_be: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of config.json, each with the only value for which vLLM computes what transformers does."""


_OF_VLLM = {
    "hidden_act": "silu",
    "is_causal": True,
    "quantization_config": None,
    "dual_chunk_attention_config": None,
}
"""`must_be` of every family."""

QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    model=Qwen3Model.Config,
    block=Qwen3TransformerBlock.Config,
    rope=CosSinRoPE.Config,
    parallelize=parallelize_qwen3,
    adapter=Qwen3StateDictAdapter,
    qk_norm=True,
    native={"use_sliding_window": False},
    must_be={**_OF_VLLM, "attention_bias": False},  # vLLM has none on the output projection
)
QWEN2 = dataclasses.replace(
    QWEN3,
    name="qwen2",
    model_type="qwen2",
    adapter=Qwen2StateDictAdapter,
    qk_norm=False,
    qkv_bias=True,
    heads_split_hidden=True,
    must_be={**_OF_VLLM, "qk_norm": False},
)
QWEN3_MOE = dataclasses.replace(
    QWEN3, name="qwen3_moe", model_type="qwen3_moe", model=PackedQwen3.Config
)
LLAMA = Family(
    name="llama3",
    model_type="llama",
    model=Llama3Model.Config,
    block=Llama3TransformerBlock.Config,
    rope=ComplexRoPE.Config,
    parallelize=parallelize_llama,
    adapter=Llama3StateDictAdapter,
    rope_types=("default", "llama3"),
    native={"attention_bias": False, "mlp_bias": False},
    # transformers' Llama has none of the last three, and vLLM's has them
    must_be={**_OF_VLLM, "sliding_window": None, "bias": False, "qkv_bias": False},
)
FAMILIES = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen2ForCausalLM": QWEN2,
    "LlamaForCausalLM": LLAMA,
}
"""Model families by the name in config.json's `architectures`."""


def beyond_torchtitan(config: "PretrainedConfig", family: Family) -> list[str]:
    """Returns the config entries that torchtitan's modules of this family lack. Such a model runs with transformers' layers.

    Example: ["rope_type 'yarn'"]
    """
    lacking = _differing(config, family.native)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in family.rope_types:
        lacking.append(f"rope_type {rope_type!r}")
    return lacking


def unlike_vllm(config: "PretrainedConfig", family: Family) -> list[str]:
    """Returns the entries of a config that vLLM computes otherwise than transformers, or not at all."""
    refused, rope = _differing(config, family.must_be), config.rope_parameters
    split = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or split
    if family.heads_split_hidden and head_dim != split:
        refused.append(f"head_dim {head_dim}, but vLLM uses hidden_size / num_attention_heads")
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        refused.append("windows in some layers, but vLLM has them in all or none")
    if "rope_type" not in rope:
        refused.append("rope_parameters by type of layer, which vLLM ignores")
    if rope.get("partial_rotary_factor") not in (None, 1):
        factor = rope["partial_rotary_factor"]
        refused.append(f"partial_rotary_factor {factor}, which transformers ignores")
    if rope.get("rope_type") == "linear" and not isinstance(rope.get("factor"), float):
        factor = f"a linear RoPE's factor {rope.get('factor')}"
        refused.append(f"{factor}, which vLLM reads only with a point, as in 4.0")
    return refused


def _differing(config: "PretrainedConfig", only: Mapping[str, Any]) -> list[str]:
    """Returns the entries of a config that differ from the given ones. Example: ["mlp_bias True"]"""
    values = {key: getattr(config, key, expected) for key, expected in only.items()}
    return [f"{key} {value!r}" for key, value in values.items() if value != only[key]]
