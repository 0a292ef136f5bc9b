"""Pack episodes into micro-batches: whole sequences, a token budget, the same number of micro-batches on every rank."""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.types import Episode, Normalizers, TrainBatch


def plan_microbatches(
    sizes: Sequence[Sequence[int]], *, num_ranks: int, max_tokens: int, attention_cost: float = 0.0
) -> list[list[list[int]]]:
    """Deal atoms (a sequence, or a whole group of them) to ranks and cut each rank's share into micro-batches.

    Args:
        sizes: for each atom, the token counts of its sequences.
        max_tokens: budget of one micro-batch; a larger atom gets one of its own.
        attention_cost: work of attending to one token, in units of one token's other work, for the balance.

    Returns:
        [rank][micro-batch] -> atom indices. Every rank has the same number of micro-batches, so that collectives match;
        a rank with too few atoms gets empty ones.

    Longest-first greedy dealing to the least loaded rank is within 4/3 of the best balance (Graham, 1969).
    """
    cost = [sum(n + attention_cost * n * n / 2 for n in atom) for atom in sizes]
    tokens = [sum(atom) for atom in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-cost[i], i))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0.0, rank) for rank in range(num_ranks)]
    for atom in order:
        used, rank = heapq.heappop(load)
        ranks[rank].append(atom)
        heapq.heappush(load, (used + cost[atom], rank))
    plans = [_first_fit(share, tokens, max_tokens) for share in ranks]
    width = max(1, max(len(plan) for plan in plans))
    for plan in plans:
        plan.extend([] for _ in range(width - len(plan)))
    return plans


def _first_fit(atoms: list[int], tokens: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: each atom goes into the first micro-batch with room for it."""
    bins: list[list[int]] = []
    used: list[int] = []
    for atom in sorted(atoms, key=lambda i: (-tokens[i], i)):
        for i, taken in enumerate(used):
            if taken + tokens[atom] <= max_tokens:
                bins[i].append(atom)
                used[i] += tokens[atom]
                break
        else:
            bins.append([atom])
            used.append(tokens[atom])
    return bins


def atoms_of(episodes: Sequence[Episode], *, whole_groups: bool) -> list[list[int]]:
    """The units that must not be split over micro-batches: each episode in the loss, or each group of them.

    An episode without completion tokens has nothing to score and is left out.
    """
    indices = [i for i, e in enumerate(episodes) if e.in_loss and e.token_ids]
    if not whole_groups:
        return [[i] for i in indices]
    groups: dict[int, list[int]] = {}
    for i in indices:
        groups.setdefault(episodes[i].prompt_idx, []).append(i)
    return list(groups.values())


def num_tokens(episode: Episode) -> int:
    """Tokens of prompt and completion."""
    return len(episode.prompt_token_ids) + len(episode.token_ids)


def split_groups(episodes: Sequence[Episode], num_parts: int) -> list[list[Episode]]:
    """Mini-batches of whole prompt groups, as equal in groups as they can be; fewer parts where there are fewer groups."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_idx, []).append(episode)
    parts: list[list[Episode]] = [[] for _ in range(max(1, min(num_parts, len(groups))))]
    for i, group in enumerate(groups.values()):
        parts[i % len(parts)].extend(group)
    return parts


def pack(episodes: Sequence[Episode], indices: Sequence[int], *, normalizers: Normalizers, multiple: int) -> TrainBatch:
    """One micro-batch of `episodes[i] for i in indices`, padded to a multiple of `multiple` tokens (at least one).

    Padding is a sequence of its own, with no loss: it is attended by nobody, and an empty micro-batch is nothing else.
    """
    chosen = [episodes[i] for i in indices]
    lengths = [num_tokens(e) for e in chosen]
    filled = sum(lengths)
    padding = -filled % multiple if filled else multiple
    T, S = filled + padding, len(chosen)

    def column(values: list[list[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
        flat = [x for row in values for x in row]
        return torch.tensor(flat + [fill] * (T - len(flat)), dtype=dtype, device=DEVICE_TYPE)  # [T]

    def at_labels(rows: list[list[float]]) -> Tensor:
        """Per-completion-token values [Lc] moved to the position that predicts each token, 0 elsewhere."""
        return column([_at_labels(e, row) for e, row in zip(chosen, rows)], torch.float32)

    references = [e.reference_logprobs for e in chosen]
    return TrainBatch(
        token_ids=column([e.prompt_token_ids + e.token_ids for e in chosen], torch.int64),
        labels=column([(e.prompt_token_ids + e.token_ids)[1:] + [0] for e in chosen], torch.int64),
        positions=torch.cat([torch.arange(n, device=DEVICE_TYPE) for n in [*lengths, padding]]),  # [T]
        loss_mask=at_labels([[1.0] * len(e.token_ids) for e in chosen]),
        sampler_logprobs=at_labels([e.sampler_logprobs for e in chosen]),
        advantages=at_labels([[e.advantage] * len(e.token_ids) for e in chosen]),
        sequence_ids=column([[i] * n for i, n in enumerate(lengths)], torch.int64, fill=S),
        group_ids=torch.tensor([e.prompt_idx for e in chosen], dtype=torch.int64, device=DEVICE_TYPE),  # [S]
        sample_ids=[e.sample_idx for e in chosen],
        weights=torch.tensor([e.weight for e in chosen], dtype=torch.float32, device=DEVICE_TYPE),  # [S]
        episode_indices=list(indices),
        normalizers=normalizers,
        reference_logprobs=at_labels(references) if chosen and None not in references else None,
    )


def _at_labels(episode: Episode, values: list[float]) -> list[float]:
    """[Lp + Lc] with values[j] at the position before completion token j."""
    return [0.0] * (len(episode.prompt_token_ids) - 1) + list(values) + [0.0]
