"""FlashAttention over a pack that holds a prompt once for all its completions."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torchtitan_rl.core.types import SegmentLayout


class SharedKeys(NamedTuple):
    """The keys of a pack of T tokens whose segments may share tokens: those of every segment, one segment after another,
    with the shared ones again in each.

    Example: own tokens [4, 2], and the second segment shares 1 token with the first -> source [0, 1, 2, 3, 0, 4, 5],
    query_ends [0, 4, 6], key_ends [0, 4, 7], longest 4.
    """

    source: Tensor
    """[K] int64, the token of the pack that each key belongs to."""
    query_ends: Tensor
    """[P + 1] int32, where the own tokens of each of P segments begin in the pack, and T."""
    key_ends: Tensor
    """[P + 1] int32, where the keys of each segment begin, and K."""
    longest: int
    """Keys of the longest segment."""

    @classmethod
    def of(cls, layout: SegmentLayout) -> "SharedKeys":
        """Returns the maps of a layout of P segments. Does not synchronize with the device."""
        device = layout.positions.device
        K = sum(layout.host_lengths)
        shared = layout.positions[layout.begins]  # [P]
        key_begins = layout.lengths.cumsum(0) - layout.lengths  # [P]
        ones = torch.arange(len(layout.host_lengths), device=device)  # [P]
        segment = torch.repeat_interleave(ones, layout.lengths, output_size=K)  # [K]
        place = torch.arange(K, device=device) - key_begins[segment]  # [K], in the segment
        own_first = layout.begins - shared  # [P], where it would begin with tokens of its own alone
        first = torch.where(
            place < shared[segment], layout.roots[segment], own_first[segment]
        )  # [K]
        T = len(layout.positions)
        query_ends = F.pad(layout.begins, (0, 1), value=T)  # [P + 1]
        key_ends = F.pad(key_begins, (0, 1), value=K)  # [P + 1]
        return cls(
            first + place,
            query_ends.int(),
            key_ends.int(),
            max(layout.host_lengths),
        )


def shared_prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: SharedKeys,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int | None,
) -> Tensor:
    """q [T, N, H], k and v [T, Nkv, H] -> [T, N, H], as if each completion had a copy of its prompt in the pack.

    A segment's own tokens are its last, and only they are queries. Query i of Lq, with Lk keys:

        out_i = softmax(scale * q_i K[..j]^T) V[..j], j = i + Lk - Lq

    FlashAttention aligns its causal mask and its window to the last key like this (docs of `flash_attn_varlen_func`, from
    version 2.1 on), forward and backward. So one call computes all segments, with nothing to merge.

    Only keys and values are copied, for each completion of a prompt. Everything else of a prompt's tokens exists once.
    """
    return varlen_attn(
        q,
        _copied(k, keys),
        _copied(v, keys),
        keys.query_ends,
        keys.key_ends,
        keys.longest,
        keys.longest,
        scale=scale,
        window_size=window_size,
        enable_gqa=enable_gqa,
        num_splits=num_splits,
    )


def _copied(t: Tensor, keys: SharedKeys) -> Tensor:
    """Keys or values of the pack's tokens [T, Nkv, H] -> those of each segment's, with copies: [K, Nkv, H].

    An embedding lookup's backward sums the gradients of a token's copies in a fixed order, in float32.
    """
    flat = t.flatten(1)  # [T, Nkv*H]
    copies = F.embedding(keys.source, flat)  # [K, Nkv*H]
    return copies.unflatten(1, t.shape[1:])
