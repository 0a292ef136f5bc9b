"""Attention over packed sequences in any dtype and on any device: torchtitan's varlen is bfloat16 on CUDA alone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module


class PackedSDPA(VarlenAttention):
    """Causal attention inside each packed sequence, by one `scaled_dot_product_attention` call for all of them.

    The sequences are laid out as a right-padded batch. A padded key comes after every real query of its row, so the
    causal mask alone keeps it out, and the fused kernel needs no mask tensor. Reads the same `VarlenMetadata` as
    torchtitan's `VarlenAttention`, so `Decoder.get_attention_masks` serves both.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: object,
    ) -> Tensor:
        """q [B, L, N, H], k and v [B, L, Nkv, H] -> [B, L, N, H]. B and L are one packed axis of B*L tokens."""
        B, L, _, H = q_BLNH.shape
        starts = attention_masks.cu_seq_q.long()  # [S + 1]
        lengths = starts.diff()  # [S]
        rows, width = lengths.numel(), int(lengths.max())
        column = torch.arange(width, device=starts.device)  # [W]
        inside = column < lengths[:, None]  # [S, W]
        # A padded cell repeats token 0 of the pack; it is neither attended to nor read back.
        source = torch.where(inside, starts[:-1, None] + column, 0)  # [S, W]

        def to_rows(t: Tensor) -> Tensor:
            flat = t.reshape(B * L, -1, H)[source.reshape(-1)]  # [S*W, N, H]
            return flat.reshape(rows, width, -1, H).transpose(1, 2)  # [S, N, W, H]

        out = F.scaled_dot_product_attention(
            to_rows(q_BLNH), to_rows(k_BLNH), to_rows(v_BLNH), is_causal=True, scale=scale, enable_gqa=enable_gqa
        )  # [S, N, W, H]
        return out.transpose(1, 2)[inside].reshape(B, L, -1, H)  # rows in order: the pack again
