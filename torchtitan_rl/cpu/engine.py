"""A CPU engine's shared memory, the block size of its KV cache, and float32 logits of a bfloat16 engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache. With vLLM's 128 on a CPU, prompts share less, and the kernels are no faster."""

HEAD_ROWS = 1024
"""Rows of the vocabulary that are converted to float32 at once. With 1,024 columns they take 4 MB and stay in cache."""


def unlink_shared_memory(ranks: Sequence[int], rank_in_replica: int) -> None:
    """Remove the name of the memory that this rank of an engine shares with the other `ranks`. Existing mappings stay valid.

    vLLM derives the name from the ranks alone and fails if it exists, so a killed run would block every later one on this
    machine.
    """
    ending = f"-[{'-'.join(map(str, ranks))}]-cpushm_{rank_in_replica}"
    for path in Path("/dev/shm").glob("*-cpushm_*"):
        if path.name.endswith(ending):
            path.unlink(missing_ok=True)


def use_wide_head(model: nn.Module) -> None:
    """Make a bfloat16 engine's output head compute float32 logits, one block of the vocabulary at a time.

    vLLM's own option (head_dtype) makes a float32 copy of the whole head for every token: 0.6 GB for Qwen3-0.6B.
    """

    def keep(layer: nn.Module) -> None:
        layer.cpu_linear = _wide_logits

    model.lm_head.quant_method.process_weights_after_loading = keep  # runs at every load; vLLM's would pack in bfloat16
    keep(model.lm_head)


def _wide_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Maps x [T, D] and weight [V, D] to logits [T, V] in float32. No supported model has a bias here."""
    wide, block = x.float(), x.new_empty(HEAD_ROWS, x.shape[-1], dtype=torch.float32)  # [T, D], [R, D]
    return torch.cat([wide @ block[: len(rows)].copy_(rows).T for rows in weight.split(HEAD_ROWS)], dim=-1)
