"""Model specs for the registry: torchtitan's own, and a Qwen3 small enough for a laptop."""

from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3 import (
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    _build_qwen3_layers,
    _qwen3_norm,
    model_registry,
)
from torchtitan.protocols.model_spec import ModelSpec


def qwen3(flavor: str) -> ModelSpec:
    """torchtitan's Qwen3 of a published size: "0.6B", "1.7B", "4B", "8B" or "14B"."""
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
