"""A prompt that a GPU computes once for its completions (`trainer.share_prompts_from`): FlashAttention over a pack that
holds it once, and plans in which its completions share a micro-batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import VarlenMetadata

from torchtitan_rl.core.trainer.minibatches import Item, Plan, plan_microbatches
from torchtitan_rl.core.trainer.packing import count_work
from torchtitan_rl.core.types import Member, SegmentLayout
from torchtitan_rl.library.attention import FlashVarlen


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
        first = torch.where(place < shared[segment], layout.roots[segment], own_first[segment])  # [K]
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


class SharedFlash(FlashVarlen):
    """FlashAttention over packs with and without shared prompts."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlashVarlen.Config):
        share_prompts_from: int = 0
        """Shortest prompt that segments may share (`trainer.share_prompts_from`). 0: none."""

        @staticmethod
        def masks(layout: SegmentLayout) -> VarlenMetadata | SharedKeys:
            if sum(layout.host_lengths) > len(layout.positions):
                return SharedKeys.of(layout)
            return FlashVarlen.Config.masks(layout)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata | SharedKeys,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q [B, L, N, H], k and v [B, L, Nkv, H] -> [B, L, N, H]. B and L are one packed axis of B*L tokens."""
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not isinstance(attention_masks, SharedKeys):
            return super().forward(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, **options)
        q = q_BLNH.flatten(0, 1).bfloat16()  # [T, N, H]
        k = k_BLNH.flatten(0, 1).bfloat16()  # [T, Nkv, H]
        v = v_BLNH.flatten(0, 1).bfloat16()  # [T, Nkv, H]
        options |= {"window_size": self.window_size, "num_splits": self.num_splits}
        out = shared_prompt_attention(q, k, v, attention_masks, **options)  # [T, N, H]
        B, L, N, _ = q_BLNH.shape
        return out.to(q_BLNH.dtype).view(B, L, N, -1)


def plan_with_siblings(
    items: Sequence[Item], *, num_ranks: int, max_tokens: int, attention_cost: float, join_siblings_from: int
) -> Plan:
    """Returns the plan of `plan_microbatches` in which a step takes the least time, of those with siblings in one item.

    Args:
        join_siblings_from: tokens of a prompt from which on its completions share a micro-batch.
    """
    options = {"attention_cost": attention_cost, "share_prompts_from": join_siblings_from}
    plans: list[Plan] = []
    for joined in ways_to_join(items, max_tokens=max_tokens, join_siblings_from=join_siblings_from):
        plans.append(plan_microbatches(joined, num_ranks=num_ranks, max_tokens=max_tokens, **options))
    return min(plans, key=lambda plan: _cost(plan, **options))


def _cost(plan: Plan, *, attention_cost: float, share_prompts_from: int) -> tuple[float, int]:
    """Returns the cost of the slowest rank in each micro-batch, where the ranks wait for one another, and the number of
    micro-batches, which decides between equal ones."""
    total = 0.0
    for of_ranks in zip(*plan, strict=True):
        costs: list[float] = []
        for members in of_ranks:
            tokens, pairs, _ = count_work(members, share_prompts_from=share_prompts_from)
            costs.append(tokens + attention_cost * pairs)
        total += max(costs)
    return total, len(plan[0])


def ways_to_join(
    items: Sequence[list[Member]], *, max_tokens: int, join_siblings_from: int
) -> Iterator[list[list[Member]]]:
    """Yields the items as they are, then with at most 2, 4, 8, ... siblings in one, as long as that joins more of them.

    Whole groups save the most tokens, and small items are easier to divide evenly over ranks.

    Args:
        items: those of one prompt are neighbours.
        max_tokens: the most tokens of a joined item. Shared ones count once.
        join_siblings_from: the tokens from which on a prompt's completions are joined.
    """
    yield [*items]
    size, before = 2, len(items)
    while True:
        joined = _joined(items, size, max_tokens, join_siblings_from)
        if len(joined) == before:
            return
        yield joined
        size, before = 2 * size, len(joined)


def _joined(items: Sequence[list[Member]], size: int, max_tokens: int, join_siblings_from: int) -> list[list[Member]]:
    """Returns the items with up to `size` siblings in one."""
    joined: list[list[Member]] = [[]]
    for item in items:
        both = joined[-1] + item
        prompts = {member.prompt.prompt_idx for member in both}
        is_long = len(item[0].prompt.token_ids) >= join_siblings_from
        fits = count_work(both, share_prompts_from=join_siblings_from)[0] <= max_tokens
        if len(prompts) == 1 and is_long and len(both) <= size and fits:
            joined[-1] = both
        else:
            joined.append(item)
    return [item for item in joined if item]
