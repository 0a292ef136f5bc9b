"""Attention over packed sequences: FlashAttention for bfloat16 on a GPU, PyTorch's SDPA for any other dtype or device."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from torchtitan_rl.core.device import compute_capability
from torchtitan_rl.core.types import SequenceLayout

# What torch takes besides its own FlashAttention 2, by the major compute capability that the kernels are written for, and
# the module that it imports them from. No pinned wheel has either module.
FLASH_KERNELS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}


def attention_config(*, float32: bool) -> VarlenAttention.Config:
    """The attention for this device: FlashAttention rounds to bfloat16 whatever it is given, and runs only on GPUs."""
    return PackedSDPA.Config() if float32 or compute_capability() == (0, 0) else FlashVarlen.Config()


def describe_attention(config: VarlenAttention.Config) -> str:
    """One line for the user: which attention the policy has, and why not a faster one."""
    if not isinstance(config, FlashVarlen.Config):
        return "attention: PyTorch's SDPA over the padded pack"
    name, missing = flash_attention()
    remark = f" ({missing} cannot be imported)" if missing else ""
    return f"attention: {name} over the packed sequences{remark}"


@cache
def flash_attention() -> tuple[str, str]:
    """Activate the best FlashAttention that this process can import, once: its name and the module that a better one needs.

    ("FA3", "") on Hopper and ("FA4", "") on Blackwell where their packages are installed; otherwise PyTorch's own "FA2",
    which runs on every GPU since Ampere, and the missing module, or "" where there is no better one.
    """
    name, module = FLASH_KERNELS.get(compute_capability()[0], ("FA2", ""))
    if name == "FA2":
        return name, ""
    try:
        activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError):  # absent, built for another torch, or without a backward pass
        return "FA2", module
    return name, ""


class FlashVarlen(VarlenAttention):
    """torchtitan's varlen attention, which itself insists on FA3 on Hopper and FA4 on Blackwell and dies without them."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size
        flash_attention()


class PackedRows(NamedTuple):
    """Where the tokens of a pack are in a right-padded batch of whole sequences, S of at most W tokens."""

    source: Tensor
    """[S * W] the pack's token in each cell; a padded cell repeats token 0, and is neither attended to nor read back."""
    width: int
    cell: Tensor
    """[T] the cell from which each token of the pack is read back."""

    @classmethod
    def of(cls, layout: SequenceLayout) -> "PackedRows":
        """The rows of a layout of S sequences. Asks the device for nothing."""
        T, width, device = len(layout.positions), layout.longest, layout.positions.device
        shared = layout.positions[layout.begins]  # [S]
        own = layout.lengths - shared  # [S]
        row = torch.repeat_interleave(torch.arange(len(own), device=device), own, output_size=T)  # [T]
        column = torch.arange(width, device=device)  # [W]
        first = torch.where(
            column < shared[:, None], layout.roots[:, None], (layout.begins - shared)[:, None]
        )  # [S, W]
        source = torch.where(column < layout.lengths[:, None], first + column, 0)  # [S, W]
        return cls(source.flatten(), width, row * width + layout.positions)


class PackedSDPA(VarlenAttention):
    """Causal float32 attention inside each packed sequence, by one `scaled_dot_product_attention` call for all of them.

    The sequences are laid out as a right-padded batch. A padded key comes after every real query of its row, so the
    causal mask alone keeps it out, and the fused kernel needs no mask tensor. What several sequences share is in the row of each.
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
        attention_masks: PackedRows,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: object,
    ) -> Tensor:
        """q [B, L, N, H], k and v [B, L, Nkv, H] -> [B, L, N, H]. B and L are one packed axis of B*L tokens."""
        H, rows = q_BLNH.shape[-1], attention_masks

        def to_rows(t: Tensor) -> Tensor:
            flat = t.flatten(0, 1).flatten(1).float()  # [T, N*H]; a CPU's bfloat16 kernel takes three times as long
            # Looked up as embeddings are: what a token's copies get of the gradient is summed in a fixed order.
            return F.embedding(rows.source, flat).unflatten(0, (-1, rows.width)).unflatten(-1, (-1, H)).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            *(to_rows(t) for t in (q_BLNH, k_BLNH, v_BLNH)), is_causal=True, scale=scale, enable_gqa=enable_gqa
        )  # [S, N, W, H]
        cells = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [S*W, N*H]
        return F.embedding(rows.cell, cells).to(q_BLNH.dtype).reshape(q_BLNH.shape)


def attention_masks(model: Decoder, layout: SequenceLayout) -> PackedRows | VarlenMetadata:
    """What the layers' attention is told of a pack's layout."""
    if shares_prompts(model):
        return PackedRows.of(layout)
    ends = torch.cat([layout.begins, layout.begins.new_tensor([len(layout.positions)])]).int()  # [S + 1]
    return VarlenMetadata(ends, ends, layout.longest, layout.longest)


def shares_prompts(model: Decoder) -> bool:
    """Whether a packed sequence may go on from another one's tokens (see PackedRows): FlashAttention knows no such."""
    return isinstance(model.config.first_attention.inner_attention, PackedSDPA.Config)
