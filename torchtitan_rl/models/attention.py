"""Attention inside the segments of a pack: FlashAttention for bfloat16 on a GPU, otherwise PyTorch's SDPA; or FlexAttention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    VarlenMetadata,
    create_attention_mask,
)
from torchtitan.protocols.module import Module

from torchtitan_rl.device import compute_capability
from torchtitan_rl.types import SegmentLayout


def attention_config(*, float32: bool) -> "PackedSDPA.Config | FlashVarlen.Config":
    """Returns this device's attention. FlashAttention needs a GPU and rounds its inputs to bfloat16."""
    if float32 or compute_capability() == (0, 0):
        return PackedSDPA.Config()
    return FlashVarlen.Config()


class FlashVarlen(VarlenAttention):
    """torchtitan's varlen attention with the FlashAttention that torch has active. torchtitan's own requires FA3 on
    Hopper and FA4 on Blackwell."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        shares_prompts: ClassVar[bool] = False
        """Whether segments may share the tokens of their prompt (see SegmentLayout)."""

        @staticmethod
        def masks(layout: SegmentLayout) -> VarlenMetadata:
            """Returns the `attention_masks` of the forward for a layout."""
            total = layout.begins.new_tensor([len(layout.positions)])  # [1]
            ends = torch.cat([layout.begins, total]).int()  # [P + 1]
            longest = max(layout.host_lengths)
            return VarlenMetadata(ends, ends, longest, longest)

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size


class PaddedBatch(NamedTuple):
    """Some segments of a pack as the rows of a right-padded batch."""

    source: Tensor
    """[R * W] the token of the pack in each cell of R rows. Padded cells hold token 0; they are neither attended to
    nor read back."""
    width: int
    """W, the length of the longest of these segments."""


class PackedRows(NamedTuple):
    """Index maps between a pack of T tokens and right-padded batches of its segments."""

    batches: list[PaddedBatch]
    cell: Tensor
    """[T] the cell of each token of the pack. Cells are counted through all batches."""

    @classmethod
    def of(cls, layout: SegmentLayout) -> "PackedRows":
        """Returns the maps of a layout of P segments. Does not synchronize with the device."""
        device = layout.positions.device
        shared = layout.positions[layout.begins]  # [P]
        own_first = layout.begins - shared  # [P]
        first_cells = [0] * len(layout.host_lengths)
        batches: list[PaddedBatch] = []
        num_cells = 0
        for rows in similar_lengths(layout.host_lengths):
            width = max(layout.host_lengths[row] for row in rows)
            for row in rows:
                first_cells[row] = num_cells
                num_cells += width
            which = torch.tensor(rows, device=device)[:, None]  # [R, 1]
            column = torch.arange(width, device=device)  # [W]
            is_shared = column < shared[which]  # [R, W]
            first = torch.where(is_shared, layout.roots[which], own_first[which])  # [R, W]
            source = torch.where(column < layout.lengths[which], first + column, 0)  # [R, W]
            batches.append(PaddedBatch(source.flatten(), width))
        own = layout.lengths - shared  # [P]
        first_cell = torch.tensor(first_cells, device=device)  # [P]
        T = len(layout.positions)
        first_cell = torch.repeat_interleave(first_cell, own, output_size=T)  # [T]
        return cls(batches, first_cell + layout.positions)


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the indices of `lengths` in batches. The longest of a batch is less than 1.25 times as long as its shortest.

    Attention to a row takes the square of the batch's width, so one batch of 1 long and 100 short segments would
    mostly compute padding. Many batches of few rows are slow too: a factor of 1.1 takes longer where lengths vary by ten times.
    """
    batches: list[list[int]] = []
    width = 0
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # stable
    for index in longest_first:
        if not batches or 5 * lengths[index] <= 4 * width:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return [sorted(batch) for batch in batches]


class PackedSDPA(VarlenAttention):
    """Causal float32 attention inside each segment, with one `scaled_dot_product_attention` call for all segments of
    similar lengths.

    The segments become right-padded batches. Padded keys come after all queries of their row, so the causal mask
    excludes them and the fused kernel needs no mask tensor. Each row contains the tokens that its segment shares
    with others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        shares_prompts: ClassVar[bool] = True
        """A prompt's tokens are copied into rows anyway."""

        @staticmethod
        def masks(layout: SegmentLayout) -> PackedRows:
            """Returns the `attention_masks` of the forward for a layout."""
            return PackedRows.of(layout)

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
        H = q_BLNH.shape[-1]
        # float, because bfloat16 takes three times as long on a CPU.
        q_packed = q_BLNH.flatten(0, 1).flatten(1).float()  # [T, N*H]
        k_packed = k_BLNH.flatten(0, 1).flatten(1).float()  # [T, Nkv*H]
        v_packed = v_BLNH.flatten(0, 1).flatten(1).float()  # [T, Nkv*H]
        cells: list[Tensor] = []
        for batch in attention_masks.batches:
            q = _to_rows(q_packed, batch, H)  # [R, N, W, H]
            k = _to_rows(k_packed, batch, H)  # [R, Nkv, W, H]
            v = _to_rows(v_packed, batch, H)  # [R, Nkv, W, H]
            out = self._attend(q, k, v, scale=scale, enable_gqa=enable_gqa)  # [R, N, W, H]
            out = out.transpose(1, 2)  # [R, W, N, H]
            cells.append(out.flatten(0, 1).flatten(1))  # [R*W, N*H]
        out = F.embedding(attention_masks.cell, torch.cat(cells))  # [T, N*H]
        return out.to(q_BLNH.dtype).reshape(q_BLNH.shape)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        """q [R, N, W, H], k and v [R, Nkv, W, H] -> [R, N, W, H]."""
        # No fused float32 kernel takes grouped heads; the other keeps [R, N, W, W] scores.
        if enable_gqa and q.is_cuda:
            repeats = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(repeats, 1)  # [R, N, W, H]
            v = v.repeat_interleave(repeats, 1)  # [R, N, W, H]
            enable_gqa = False
        before = self.window_size[0]
        width = q.shape[2]
        band = None
        if 0 <= before < width - 1:  # a sliding window, shorter than the longest segment
            band = torch.ones(width, width, dtype=torch.bool, device=q.device)  # [W, W]
            band = band.tril().triu(-before)  # [W, W]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=enable_gqa
        )


def _to_rows(flat: Tensor, batch: PaddedBatch, head_dim: int) -> Tensor:
    """[T, N*H] -> [R, N, W, H]."""
    # An embedding lookup's backward sums the gradients of a token's copies in a fixed order.
    cells = F.embedding(batch.source, flat)  # [R*W, N*H]
    rows = cells.unflatten(0, (-1, batch.width))  # [R, W, N*H]
    return rows.unflatten(-1, (-1, head_dim)).transpose(1, 2)


_compiled_flex = torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})


class FlexPacked(FlexAttention):
    """FlexAttention to a pack: each token attends to its own segment, and to the tokens that this shares with its root. Its backward
    needs a GPU. torchtitan's own forward times kernels to choose one, so that a run would not repeat bit by bit."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        shares_prompts: ClassVar[bool] = True

        def masks(self, layout: SegmentLayout) -> BlockMask:
            """Returns the `attention_masks` of the forward for a layout. Does not synchronize with the device."""
            T, size = len(layout.positions), self.block_size
            shared = layout.positions[layout.begins]  # [P]
            places = torch.stack([layout.begins, layout.roots, layout.roots + shared])  # [3, P]
            own = layout.lengths - shared  # [P]
            begins, roots, ends = places.repeat_interleave(own, 1, output_size=T)  # [T] each

            def attends(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                is_own = (begins[q] <= k) & (k <= q)
                return is_own | ((roots[q] <= k) & (k < ends[q]))

            return create_attention_mask(attends, 1, 1, T, T, places.device, BLOCK_SIZE=size)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        **kw: Any,
    ) -> Tensor:
        """q [1, T, N, H], k and v [1, T, Nkv, H] -> [1, T, N, H]. `kw`: scale and enable_gqa."""
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))  # [1, N or Nkv, T, H]
        return _compiled_flex(q, k, v, block_mask=attention_masks, **kw).transpose(1, 2)
