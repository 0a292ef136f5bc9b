"""Models for the configs: torchtitan's Qwen3, one small enough for a laptop, and either as transformers knows it."""

from typing import TYPE_CHECKING, Any

from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.qwen3 import (
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    _build_qwen3_layers,
    _qwen3_norm,
    model_registry,
)
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.run.errors import expect

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
"""The published dense ones that torchtitan has."""


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
    spec = qwen3("0.6B")
    spec.flavor = f"{n_layers}x{dim}"
    rope = CosSinRoPE.Config(dim=head_dim, max_seq_len=max_seq_len, theta=rope_theta)
    spec.model = Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=_qwen3_norm(dim),
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=_EMBEDDING_SKIP_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_LINEAR_INIT),
        layers=_build_qwen3_layers(
            n_layers=n_layers,
            dim=dim,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            attn_backend="varlen",
            rope=rope,
        ),
    )
    return spec


def hf_architecture(config: Decoder.Config) -> dict[str, Any]:
    """The entries of a Hugging Face config.json that describe this dense model's architecture."""
    layer = config.layers[0]
    attention = layer.attention
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "tie_word_embeddings": config.enable_weight_tying,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": attention.rope.theta,
    }


def new_hf_model(spec: ModelSpec, **settings: Any) -> "Qwen3ForCausalLM":
    """transformers' model of a spec of this page, with random weights from torch's generator, in the default dtype.

    Args:
        settings: further entries of its config.json.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    entries = {"max_position_embeddings": spec.model.max_seq_len, **hf_architecture(spec.model), **settings}
    # For short sequences plain matrix products are a fifth faster than the CPU's flash attention.
    return Qwen3ForCausalLM._from_config(Qwen3Config(**entries), attn_implementation="eager")
