"""A bfloat16 engine's float32 logits on a CPU, and its cache's block size."""

import torch
from torch import Tensor, nn

BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache. vLLM's 128 on a CPU share less of a prompt, and its kernels are no faster with them."""

HEAD_ROWS = 1024
"""Rows of the vocabulary that are widened at once: 4 MB in float32 for 1,024 columns stay in cache."""


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
