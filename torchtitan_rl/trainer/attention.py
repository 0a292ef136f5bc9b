"""Attention over packed sequences: FlashAttention for bfloat16 on a GPU, PyTorch's SDPA for any other dtype or device."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from torchtitan_rl.device import ON_CPU, compute_capability

# What torch takes besides its own FlashAttention 2, by the major compute capability that the kernels are written for, and
# the module that it imports them from. No pinned wheel has either module.
FLASH_KERNELS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}


def attention_config(*, float32: bool) -> VarlenAttention.Config:
    """The attention for this device: FlashAttention rounds to bfloat16 whatever it is given, and runs on GPUs alone."""
    return PackedSDPA.Config() if float32 or ON_CPU else FlashVarlen.Config()


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

        rows_of = [to_rows(t) for t in (q_BLNH, k_BLNH, v_BLNH)]  # [S, N or Nkv, W, H] each
        if ON_CPU:  # its bfloat16 kernel takes three times as long as float32's
            rows_of = [t.float() for t in rows_of]
        out = F.scaled_dot_product_attention(
            *rows_of, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )  # [S, N, W, H]
        return out.transpose(1, 2)[inside].to(q_BLNH.dtype).reshape(B, L, -1, H)  # rows in order: the pack again
