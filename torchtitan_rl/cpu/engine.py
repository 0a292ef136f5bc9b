"""What a CPU engine computes in another way than vLLM chooses there: the same numbers, in fewer passes over memory."""

import torch
from torch import Tensor, nn

BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache. vLLM's 128 on a CPU share less of a prompt, and its kernels are no faster with them."""

PROVIDER = "torchtitan_rl"
NORM_PRIORITY = {name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")}
"""The engine's `ir_op_priority` once `register_norms` was called."""

HEAD_ROWS = 1024
"""Of the vocabulary that are widened at once: 4 MB in float32 for 1,024 columns stay in cache."""


def register_norms() -> None:
    """Offer vLLM the RMSNorm kernel that its build for CPUs has but does not choose: its own way takes eight operations."""
    from vllm.ir import ops

    if PROVIDER not in ops.rms_norm.impls:
        ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(_rms_norm)
        ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_sum_fits, inplace=True)(_fused_add_rms_norm)


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _sum_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """[..., D] -> [..., D]; the kernel reads rows that follow one another, which a view of fused projections has not."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Both [..., D], overwritten: the norm of their sum, and the sum."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def use_wide_head(model: nn.Module) -> None:
    """Let a bfloat16 engine's output head give float32 logits, block by block of the vocabulary.

    vLLM's own way to such logits (head_dtype) makes a float32 copy of the whole head for every token: 0.6 GB for Qwen3-0.6B.
    """

    def keep(layer: nn.Module) -> None:
        layer.cpu_linear = _wide_logits

    model.lm_head.quant_method.process_weights_after_loading = keep  # in place of packing it in bfloat16, at every load
    keep(model.lm_head)


def _wide_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, D], weight [V, D] -> [T, V] in float32. No model here has a bias."""
    wide, block = x.float(), x.new_empty(HEAD_ROWS, x.shape[-1], dtype=torch.float32)  # [T, D], [R, D]
    return torch.cat([wide @ block[: len(rows)].copy_(rows).T for rows in weight.split(HEAD_ROWS)], dim=-1)
