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
    queries: Tensor
    """[R * Q] the token of the pack at each query. Rows whose queries are not all of their tokens leave out the shared ones."""
    num_queries: int
    """Q, the most queries of a row; W if the rows have a query for each token."""
    mask: Tensor | None
    """[R, 1, Q, W] float32, 0 where a query attends to a token and -inf elsewhere; None: causal, as Q is W."""


class PackedRows(NamedTuple):
    """Index maps between a pack of T tokens and right-padded batches of its segments."""

    batches: list[PaddedBatch]
    cell: Tensor
    """[T] the cell of each token of the pack. Cells are counted through all batches."""
    query: Tensor
    """[T] the query of each token of the pack, counted through all batches."""

    @classmethod
    def of(cls, layout: SegmentLayout) -> "PackedRows":
        """Returns the maps of a layout of P segments. Does not synchronize with the device."""
        device = layout.positions.device
        shared = layout.positions[layout.begins]  # [P]
        own_first = layout.begins - shared  # [P]
        lengths, skipped = layout.host_lengths, _skipped_queries(layout, shared)
        first_cells, first_queries = [0] * len(lengths), [0] * len(lengths)
        batches: list[PaddedBatch] = []
        num_cells = num_queries = 0
        for rows in similar_lengths(lengths, [skip > 0 for skip in skipped]):
            W = max(lengths[row] for row in rows)
            Q = max(lengths[row] - skipped[row] for row in rows)
            for row in rows:
                first_cells[row], first_queries[row] = num_cells, num_queries - skipped[row]
                num_cells, num_queries = num_cells + W, num_queries + Q
            which = torch.tensor(rows, device=device)[:, None]  # [R, 1]
            column = torch.arange(W, device=device)  # [W]
            is_shared = column < shared[which]  # [R, W]
            first = torch.where(is_shared, layout.roots[which], own_first[which])  # [R, W]
            source = torch.where(column < layout.lengths[which], first + column, 0)  # [R, W]
            queries, mask = source, None  # [R, Q]
            if skipped[rows[0]]:
                position = shared[which] + column[:Q]  # [R, Q]
                inside = position < layout.lengths[which]  # [R, Q]
                queries = torch.where(inside, own_first[which] + position, 0)  # [R, Q]
                hidden = column > position[:, None, :, None]  # [R, 1, Q, W]
                mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            batches.append(PaddedBatch(source.flatten(), W, queries.flatten(), Q, mask))
        own = layout.lengths - shared  # [P]
        T = len(layout.positions)
        firsts = torch.tensor([first_cells, first_queries], device=device)  # [2, P]
        firsts = torch.repeat_interleave(firsts, own, dim=1, output_size=T)  # [2, T]
        return cls(batches, *(firsts + layout.positions))


def _skipped_queries(layout: SegmentLayout, shared: Tensor) -> list[int]:
    """Returns how many of each segment's first tokens its row has no query for, [P].

    These are its shared tokens, whose queries the root's row has. Without them the kernel needs a mask and computes all of its cells
    instead of half, so this pays where at least half of the segment is shared. A GPU's fused kernel would not take such a mask.
    """
    if layout.positions.is_cuda:
        return [0] * len(layout.host_lengths)
    return [
        count if 2 * count >= length else 0
        for count, length in zip(shared.tolist(), layout.host_lengths, strict=True)
    ]


def similar_lengths(lengths: Sequence[int], kinds: Sequence[bool]) -> list[list[int]]:
    """Returns the indices of `lengths` in batches of one kind. The longest of a batch is less than 1.25 times as long as its shortest.

    Attention to a row takes the square of the batch's width, so one batch of 1 long and 100 short segments would
    mostly compute padding. Many batches of few rows are slow too: a factor of 1.1 takes longer where lengths vary by ten times.
    """
    batches: list[list[int]] = []
    width = 0
    longest_first = sorted(range(len(lengths)), key=lambda i: (kinds[i], -lengths[i]))  # stable
    for index in longest_first:
        is_new = not batches or kinds[index] != kinds[batches[-1][0]]
        if is_new or 5 * lengths[index] <= 4 * width:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return [sorted(batch) for batch in batches]


class PackedSDPA(VarlenAttention):
    """Causal float32 attention inside each segment, with one `scaled_dot_product_attention` call for all segments of
    similar lengths.

    The segments become right-padded batches. Padded keys come after all queries of their row, so the causal mask
    excludes them and the fused kernel needs no mask tensor. Each row contains the tokens that its segment shares
    with others, and on a CPU leaves out their queries where that is faster.
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
            q = _to_rows(q_packed, batch.queries, batch.num_queries, H)  # [R, N, Q, H]
            k = _to_rows(k_packed, batch.source, batch.width, H)  # [R, Nkv, W, H]
            v = _to_rows(v_packed, batch.source, batch.width, H)  # [R, Nkv, W, H]
            out = self._attend(q, k, v, batch.mask, scale, enable_gqa)
            out = out.transpose(1, 2)  # [R, Q, N, H]
            cells.append(out.flatten(0, 1).flatten(1))  # [R*Q, N*H]
        out = F.embedding(attention_masks.query, torch.cat(cells))  # [T, N*H]
        return out.to(q_BLNH.dtype).reshape(q_BLNH.shape)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """q [R, N, Q, H], k and v [R, Nkv, W, H], mask of a PaddedBatch -> [R, N, Q, H]."""
        # No fused float32 kernel takes grouped heads; the other keeps [R, N, W, W] scores.
        if enable_gqa and q.is_cuda:
            repeats = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(repeats, 1)  # [R, N, W, H]
            v = v.repeat_interleave(repeats, 1)  # [R, N, W, H]
            enable_gqa = False
        before = self.window_size[0]
        width = k.shape[2]
        if 0 <= before < width - 1:  # a sliding window, shorter than the longest segment
            if mask is None:
                mask = torch.full((width, width), -torch.inf, device=q.device).triu(1)  # [W, W]
            hidden = mask != 0  # [R, 1, Q, W] or [W, W]
            # A token is too old for a query that attends to the one `before` + 1 later.
            too_old = F.pad(~hidden[..., before + 1 :], (0, before + 1))
            mask = mask.masked_fill(too_old, -torch.inf)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )


def _to_rows(flat: Tensor, source: Tensor, width: int, head_dim: int) -> Tensor:
    """[T, N*H], source [R * width] -> [R, N, width, H]."""
    # An embedding lookup's backward sums the gradients of a token's copies in a fixed order.
    cells = F.embedding(source, flat)  # [R*width, N*H]
    rows = cells.unflatten(0, (-1, width))  # [R, width, N*H]
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
