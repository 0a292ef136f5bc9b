"""Small random models: of a debug config's start, of tests and of benchmarks."""

from typing import TYPE_CHECKING, Any

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.models.families import FAMILIES, QWEN3, QWEN3_MOE
from torchtitan_rl.models.hf_config import decoder_spec, hf_architecture
from torchtitan_rl.models.mixture_of_experts import MixtureOfExperts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    num_experts: int = 0,
    top_k: int = 2,
) -> ModelSpec:
    """Returns a Qwen3 with tied embeddings and these dimensions; by default 2.4M parameters at a small vocabulary.

    Args:
        num_experts: with more than 0, each layer has as many experts of `hidden_dim` in place of its MLP.
        top_k: experts of a token.
    """
    entries = {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": hidden_dim,
        "max_position_embeddings": max_seq_len,
        "rope_theta": rope_theta,
    }
    mixture = MixtureOfExperts(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=hidden_dim,
        norm_topk_prob=True,
    )
    return decoder_spec(
        QWEN3_MOE if num_experts else QWEN3,
        **entries,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        mixture=mixture if num_experts else None,
    )


def new_hf_model(spec: ModelSpec, **settings: Any) -> "PreTrainedModel":
    """Returns transformers' model for a spec, with random weights, in torch's default dtype.

    Args:
        settings: further entries of config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_types = {family.name: family.model_type for family in FAMILIES.values()}
    entries = {
        "max_position_embeddings": spec.model.max_seq_len,
        **hf_architecture(spec.model),
        **settings,
    }
    config = AutoConfig.for_model(**{"model_type": model_types.get(spec.name), **entries})
    # For short sequences, eager attention is 20 % faster than flash attention on a CPU.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
