"""Linear attention in a pack: a layer's state begins anew with each sequence.

Gated delta nets (Yang et al., arXiv 2412.06464) are the linear layers of Qwen3.5. Such a layer carries a state from token to token,
and its convolution reads the tokens before. transformers' code would carry both into the next sequence of a pack.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import Configurable
from torchtitan.models.common.attention import VarlenMetadata

from torchtitan_rl.errors import expect
from torchtitan_rl.models.attention import PackedRows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


LINEAR = {"qwen3_5_text": "linear_attn"}
"""Model types with linear layers, and what a decoder layer calls its own. In others such layers are not tested."""

KERNELS = ("fla", "causal_conv1d")
"""The modules of transformers' kernels that know where sequences begin."""


def run_on_sequences(layer: nn.Module) -> None:
    """Let a linear layer of transformers be computed by the `PackedCall` of each forward."""
    forward = layer.forward

    def packed_forward(hidden_states: Tensor, *, packed: Any, **_: Any) -> Tensor:
        """[1, T, D] -> [1, T, D]"""
        return packed.linear(forward, hidden_states)

    layer.forward = packed_forward


def each_sequence(
    forward: Callable[..., Tensor], hidden: Tensor, masks: PackedRows | VarlenMetadata
) -> Tensor:
    """Returns a linear layer's output for a pack of T tokens, [1, T, D] -> [1, T, D], as if each sequence were alone.

    With PackedRows the sequences become right-padded batches: no token reads one after it, so padding changes nothing. Otherwise
    the kernels are told where sequences begin, which no GPU has run here.
    """
    if isinstance(masks, VarlenMetadata):
        ends = masks.cu_seq_q  # [P + 1]
        tokens = torch.arange(hidden.shape[1], device=ends.device)  # [T]
        numbers = torch.bucketize(tokens, ends[1:], right=True)  # [T]
        return forward(hidden_states=hidden, cu_seq_lens_q=ends, seq_idx=numbers.int()[None])
    cells: list[Tensor] = []
    for batch in masks.batches:
        rows = F.embedding(batch.source, hidden[0])  # [R*W, D]
        out = forward(hidden_states=rows.unflatten(0, (-1, batch.width)))  # [R, W, D]
        cells.append(out.flatten(0, 1))
    return F.embedding(masks.cell, torch.cat(cells))[None]  # [1, T, D]


def check_linear(
    config: "PretrainedConfig",
    trainer: Configurable.Config,
    generator: Configurable.Config,
    *,
    on_cpu: bool,
) -> None:
    """Check the settings of a model with linear layers. Raises UserError, naming the field."""
    whose = f"for {config.model_type}, which has linear layers"
    expected = f"False {whose}: it is not tested"
    expect(not trainer.compile, "trainer.compile", True, expected, "Leave it off.")
    if on_cpu:
        dtype, remedy = generator.dtype, "Set --generator.dtype bfloat16."
        expected = f"bfloat16 {whose}: vLLM has no other on a CPU. The trainer may be float32"
        expect(dtype == "bfloat16", "generator.dtype", dtype, expected, remedy)
        return
    absent = [name for name in KERNELS if find_spec(name) is None]
    expected = f"kernels {whose} that know where sequences begin, but {' and '.join(absent)} cannot be imported"
    remedy = "Install flash-linear-attention and causal-conv1d. float32 needs neither."
    holds = trainer.mixed_precision_param == "float32" or not absent
    expect(holds, "trainer.mixed_precision_param", "bfloat16", expected, remedy)
