"""Attention over packed sequences: FlashAttention for bfloat16 on a GPU, otherwise PyTorch's SDPA."""

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

FLASH_KERNELS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
"""The kernels that torch can use instead of its own FA2, and their module, by major compute capability. No pinned
wheel has either module."""


def attention_config(*, float32: bool) -> VarlenAttention.Config:
    """Returns this device's attention. FlashAttention needs a GPU and rounds its inputs to bfloat16."""
    if float32 or compute_capability() == (0, 0):
        return PackedSDPA.Config()
    return FlashVarlen.Config()


def describe_attention(config: VarlenAttention.Config) -> str:
    """Returns one line for the user: the policy's attention, and the missing module of a faster one."""
    if not isinstance(config, FlashVarlen.Config):
        return "attention: PyTorch's SDPA over the padded pack"
    name, missing = flash_attention()
    absent = f" ({missing} cannot be imported)" if missing else ""
    return f"attention: {name} over the packed sequences{absent}"


@cache
def flash_attention() -> tuple[str, str]:
    """Activate the best FlashAttention that can be imported. Returns its name and the module that a better one needs.

    Returns ("FA3", "") on Hopper and ("FA4", "") on Blackwell if their packages are installed. Otherwise "FA2",
    PyTorch's own for Ampere and later, with the missing module, or "" if no better one exists for this GPU.
    """
    name, module = FLASH_KERNELS.get(compute_capability()[0], ("FA2", ""))
    if name == "FA2":
        return name, ""
    try:
        activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError):
        # It is absent, built for another torch, or has no backward.
        return "FA2", module
    return name, ""


class FlashVarlen(VarlenAttention):
    """torchtitan's varlen attention with any FlashAttention. torchtitan's own requires FA3 on Hopper and FA4 on
    Blackwell."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size
        flash_attention()


class PackedRows(NamedTuple):
    """Index maps between a pack of T tokens and a right-padded batch of P sequences with W tokens each."""

    source: Tensor
    """[P * W] the token of the pack in each cell. Padded cells hold token 0; they are neither attended to nor read
    back."""
    width: int
    """W, the length of the longest sequence."""
    cell: Tensor
    """[T] the cell of each token of the pack."""

    @classmethod
    def of(cls, layout: SequenceLayout) -> "PackedRows":
        """Returns the maps of a layout of P sequences. Does not synchronize with the device."""
        T, width, device = len(layout.positions), layout.longest, layout.positions.device
        shared = layout.positions[layout.begins]  # [P]
        own = layout.lengths - shared  # [P]
        sequence = torch.arange(len(own), device=device)  # [P]
        row = torch.repeat_interleave(sequence, own, output_size=T)  # [T]
        column = torch.arange(width, device=device)  # [W]
        own_first = (layout.begins - shared)[:, None]  # [P, 1]
        root_first = layout.roots[:, None]  # [P, 1]
        first = torch.where(column < shared[:, None], root_first, own_first)  # [P, W]
        source = torch.where(column < layout.lengths[:, None], first + column, 0)  # [P, W]
        return cls(source.flatten(), width, row * width + layout.positions)


class PackedSDPA(VarlenAttention):
    """Causal float32 attention inside each packed sequence, with one `scaled_dot_product_attention` call for all
    sequences.

    The sequences become a right-padded batch. Padded keys come after all queries of their row, so the causal mask
    excludes them and the fused kernel needs no mask tensor. Each row contains the tokens that its sequence shares
    with others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size

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
            # float, because bfloat16 takes three times as long on a CPU.
            flat = t.flatten(0, 1).flatten(1).float()  # [T, N*H]
            # An embedding lookup's backward sums the gradients of a token's copies in a fixed order.
            return (
                F.embedding(rows.source, flat)
                .unflatten(0, (-1, rows.width))
                .unflatten(-1, (-1, H))
                .transpose(1, 2)
            )

        q, k, v = (to_rows(t) for t in (q_BLNH, k_BLNH, v_BLNH))  # [P, N or Nkv, W, H]
        # No fused float32 kernel takes grouped heads; the other keeps [P, N, W, W] scores.
        if enable_gqa and q.is_cuda:
            repeats = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(repeats, 1)  # [P, N, W, H]
            v = v.repeat_interleave(repeats, 1)  # [P, N, W, H]
            enable_gqa = False
        before = self.window_size[0]
        band = None
        if 0 <= before < rows.width - 1:  # a sliding window, shorter than the longest sequence
            band = torch.ones(rows.width, rows.width, dtype=torch.bool, device=q.device)  # [W, W]
            band = band.tril().triu(-before)  # [W, W]
        # [P, N, W, H]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=enable_gqa
        )
        cells = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [P*W, N*H]
        return F.embedding(rows.cell, cells).to(q_BLNH.dtype).reshape(q_BLNH.shape)


def attention_masks(model: Decoder, layout: SequenceLayout) -> PackedRows | VarlenMetadata:
    """Returns the `attention_masks` argument of the model's forward for a layout."""
    if shares_prompts(model):
        return PackedRows.of(layout)
    total = layout.begins.new_tensor([len(layout.positions)])  # [1]
    ends = torch.cat([layout.begins, total]).int()  # [P + 1]
    return VarlenMetadata(ends, ends, layout.longest, layout.longest)


def shares_prompts(model: Decoder) -> bool:
    """Whether packed sequences may share their first tokens (see SequenceLayout). FlashAttention does not support
    it."""
    return isinstance(model.config.first_attention.inner_attention, PackedSDPA.Config)
