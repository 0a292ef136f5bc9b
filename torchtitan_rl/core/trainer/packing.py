"""Packs episodes into micro-batches of whole sequences, within a token budget, equally many on every rank."""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.types import Episode, Group, Member, Normalizers, SequenceLayout, TrainBatch

Atom = list[Member]
"""Sequences that must share a micro-batch: a single one, or a whole group."""


def atoms_of(groups: Sequence[Group[Episode]], *, whole_groups: bool) -> list[Atom]:
    """Returns the episodes in the loss, one by one or by groups. Episodes without sampled tokens are left out."""
    members = [
        [Member(group.prompt, e) for e in group.samples if e.in_loss and e.completion.loss_mask.any()]
        for group in groups
    ]
    return [group for group in members if group] if whole_groups else [[one] for group in members for one in group]


def split_groups(groups: Sequence[Group[Episode]], num_parts: int) -> list[list[Group[Episode]]]:
    """Split the groups with a loss into at most `num_parts` mini-batches with equal numbers of groups, to within one.

    No mini-batch is empty, because AdamW's momentum alone would move the policy.
    """
    learning = [group for group in groups if any(episode.in_loss for episode in group.samples)]
    num_parts = min(num_parts, len(learning))
    return [learning[part::num_parts] for part in range(num_parts)]


def plan_microbatches(
    atoms: Sequence[Atom], *, num_ranks: int, max_tokens: int, attention_cost: float = 0.0
) -> list[list[list[Member]]]:
    """Assign atoms to ranks and split each rank's share into micro-batches.

    Args:
        max_tokens: budget of one micro-batch. A larger atom gets a micro-batch of its own.
        attention_cost: cost of attending to one token, relative to one token's other work, for the balance.

    Returns:
        [rank][micro-batch] -> members. Every rank has the same number of micro-batches, so that collectives match. Ranks
        with too few atoms get empty ones. Without atoms no rank has any.

    Assigning the largest atom first, to the least loaded rank, is within 4/3 of the optimum (Graham, 1969).
    """
    costs = [sum(n + attention_cost * n * n / 2 for n in (member.num_tokens for member in atom)) for atom in atoms]
    ranks: list[list[Atom]] = [[] for _ in range(num_ranks)]
    load = [(0.0, rank) for rank in range(num_ranks)]
    for i in sorted(range(len(atoms)), key=lambda i: (-costs[i], i)):
        used, rank = heapq.heappop(load)
        ranks[rank].append(atoms[i])
        heapq.heappush(load, (used + costs[i], rank))
    plans = [_first_fit(share, max_tokens) for share in ranks]
    width = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(width - len(plan))] for plan in plans]


def _first_fit(atoms: list[Atom], max_tokens: int) -> list[list[Member]]:
    """First-fit decreasing: each atom goes into the first micro-batch with enough room."""
    bins: list[list[Member]] = []
    used: list[int] = []
    for atom in sorted(atoms, key=num_tokens, reverse=True):  # stable
        size = num_tokens(atom)
        place = next((i for i, taken in enumerate(used) if taken + size <= max_tokens), len(bins))
        if place == len(bins):
            bins.append([])
            used.append(0)
        bins[place] += atom
        used[place] += size
    return bins


def num_tokens(atom: Atom) -> int:
    """Returns the tokens of an atom's sequences."""
    return sum(member.num_tokens for member in atom)


def work_in(members: Sequence[Member], *, share_prompts: bool) -> tuple[int, int, int]:
    """Returns one micro-batch's tokens, pairs of a token and one it attends to (or itself), and tokens in the loss.

    A shared prompt counts once.
    """
    spans = [(shared, member.num_tokens) for member, shared in _laid_out(members, share_prompts)]
    attended = sum((end * (end + 1) - begin * (begin + 1)) // 2 for begin, end in spans)
    scored = sum(member.episode.completion.num_sampled for member in members)
    return sum(end - begin for begin, end in spans), attended, scored


def _laid_out(members: Sequence[Member], share_prompts: bool) -> list[tuple[Member, int]]:
    """Returns the sequences in their order in the pack, each with the number of prompt tokens it shares with the one before.

    The prompt's last token is not shared, because it predicts a different token in each sequence.
    """
    if not share_prompts:
        return [(member, 0) for member in members]
    members = sorted(members, key=lambda member: member.prompt.prompt_idx)  # stable
    before = [None, *(member.prompt.prompt_idx for member in members)]
    return [
        (member, len(member.prompt.token_ids) - 1 if member.prompt.prompt_idx == idx else 0)
        for member, idx in zip(members, before, strict=False)
    ]


def pack(
    members: Sequence[Member],
    *,
    normalizers: Normalizers,
    multiple: int,
    share_prompts: bool = False,
    sequence_columns: Sequence[str] = (),
    token_columns: Sequence[str] = (),
) -> TrainBatch:
    """Returns one micro-batch, padded to a positive multiple of `multiple` tokens.

    Padding forms sequences of its own without a loss. None is longer than the longest member, so that attention needs no
    wider rows. An empty micro-batch consists of padding only.

    Args:
        share_prompts: store a prompt's tokens once for all its completions. All but the first completion then start with the
            prompt's last token, at its position in the prompt (see SequenceLayout).
        sequence_columns, token_columns: names in `Credit.columns` and `Credit.token_columns` that the batch gets too.
    """
    laid_out = _laid_out(members, share_prompts)
    members, shared = [member for member, _ in laid_out], np.array([n for _, n in laid_out], dtype=np.int64)  # [S] each
    prompts = [member.prompt.token_ids[n:] for member, n in laid_out]
    episodes = [member.episode for member in members]
    completions = [episode.completion for episode in episodes]
    lengths = np.array([len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)], dtype=np.int64)
    filled = int(lengths.sum())
    padding = -filled % multiple if filled else multiple
    longest = int((lengths + shared).max(initial=0)) or padding
    padded = [min(longest, padding - begin) for begin in range(0, padding, longest)]  # lengths of padding sequences

    def column(rows: Sequence[np.ndarray], dtype: type, fill: float = 0) -> np.ndarray:
        return np.concatenate([*rows, np.full(padding, fill)], dtype=dtype, casting="unsafe")  # [T]

    def at_labels(rows: Sequence[np.ndarray]) -> Tensor:
        """Values [L] of completion tokens -> [T], each at the position that predicts the token, 0 elsewhere."""
        spread = [part for p, row in zip(prompts, rows, strict=True) for part in (np.zeros(len(p)), row)]
        return _on_device(_shifted(column(spread, np.float32), lengths))

    token_ids = column([ids for p, c in zip(prompts, completions, strict=True) for ids in (p, c.token_ids)], np.int64)
    references = [e.reference_logprobs for e in episodes]
    all_fresh = all(c.token_versions is None for c in completions)
    return TrainBatch(
        token_ids=_on_device(token_ids),
        labels=_on_device(_shifted(token_ids, lengths)),
        layout=SequenceLayout.of([*lengths, *padded], [*shared, *[0] * len(padded)], device=DEVICE_TYPE),
        loss_mask=at_labels([c.loss_mask for c in completions]),
        fresh_mask=None if all_fresh else at_labels([c.fresh_mask for c in completions]),
        sampler_logprobs=at_labels([c.logprobs for c in completions]),
        advantages=at_labels([e.token_advantages for e in episodes]),
        sequence_ids=_on_device(np.repeat(np.arange(len(members) + 1), [*lengths, padding])),
        group_ids=_on_device(np.array([m.prompt.prompt_idx for m in members], dtype=np.int64)),  # [S]
        members=members,
        normalizers=normalizers,
        reference_logprobs=at_labels(references) if members and all(r is not None for r in references) else None,
        columns={
            name: _on_device(np.array([e.credit.columns[name] for e in episodes], dtype=np.float32))  # [S]
            for name in sequence_columns
        },
        token_columns={name: at_labels([e.credit.token_columns[name] for e in episodes]) for name in token_columns},
    )


def _shifted(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the next token's value in the same sequence, [T] -> [T]; 0 at each sequence's end and on padding."""
    shifted = np.append(values[1:], 0).astype(values.dtype)
    shifted[np.cumsum(lengths) - 1] = 0
    shifted[int(lengths.sum()) :] = 0
    return shifted


def _on_device(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(DEVICE_TYPE)
