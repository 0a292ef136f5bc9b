"""Metrics of a step's completions: lengths, finish reasons, diversity, conversations. Equal on every rank."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import numpy as np

from torchtitan_rl.observe.metrics.reward_stats import clipped_fraction, fraction
from torchtitan_rl.summary import describe, same_everywhere
from torchtitan_rl.types import Completion, Episode, Group, Member, Metric, flat

DIVERSITY_TOKENS = 50_000
"""Tokens of a step on which diversity is measured, in whole groups. The limit keeps the cost at milliseconds."""


def completion_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`completions/...`: finish reasons, and lengths in sampled tokens: of all, of stopped, of right and of wrong ones.

    A key without any completion to measure (none stopped, none was judged) is absent.
    """
    episodes = flat(groups)
    if not episodes:
        return {}
    stopped = [e for e in episodes if e.completion.finish_reason == "stop"]
    right = [e for e in episodes if e.scored.correct]
    wrong = [e for e in episodes if e.scored.correct is False]
    ends = Counter(episode.completion.finish_reason for episode in episodes)
    members = [Member.of(group, episode) for group in groups for episode in group.samples]
    prompt_tokens = sum(len(member.prompt.token_ids) for member in members)
    spread = ("mean", "min", "max")
    return {
        **describe("completions/length", _lengths(episodes), spread),
        **describe("completions/terminated_length", _lengths(stopped), spread),
        **describe("completions/right_length", _lengths(right), ("mean",)),
        **describe("completions/wrong_length", _lengths(wrong), ("mean",)),
        "completions/clipped_fraction": clipped_fraction(episodes),
        "completions/tokens": same_everywhere(float(sum(_lengths(episodes)))),
        "completions/prompt_tokens": same_everywhere(float(prompt_tokens)),
        "completions/count": same_everywhere(float(len(episodes))),
        **{
            f"completions/finish_reason/{end}": same_everywhere(n / len(episodes))
            for end, n in ends.items()
        },
    }


def _lengths(episodes: Sequence[Episode]) -> list[int]:
    return [episode.completion.num_sampled for episode in episodes]


def staleness_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`in_flight/...` of groups that earlier steps have begun: their share of groups and tokens, and their ages in updates.

    Empty if every token is from the newest weights. A group's age is that of its oldest token.
    """
    completions = [episode.completion for episode in flat(groups)]
    if all(completion.token_versions is None for completion in completions):
        return {}
    sampled = sum(completion.num_sampled for completion in completions)
    fresh = sum(int(np.count_nonzero(completion.fresh_mask)) for completion in completions)
    ages = [
        max(e.completion.policy_version - e.completion.oldest_version for e in group.samples)
        for group in groups
        if group.samples
    ]
    return {
        **describe("in_flight/age", [float(age) for age in ages], ("mean", "max")),
        "in_flight/carried_groups_fraction": fraction([age > 0 for age in ages]),
        "in_flight/carried_tokens_fraction": same_everywhere((sampled - fresh) / max(sampled, 1)),
    }


def diversity_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`diversity/...`: how much a prompt's completions differ: distinct-1, distinct-2 and pairwise Jaccard distance.

    distinct-n is the number of different n-grams of sampled tokens in a group over its number of n-grams. No n-gram
    crosses the boundary of a completion. The Jaccard distance of two completions with token sets A and B is
    1 - |A & B| / |A | B|. macro: the mean over groups; micro: over all n-grams, or pairs, of all groups. Groups are
    measured in order until `DIVERSITY_TOKENS` is reached, at least one.
    """
    shares: dict[str, list[tuple[float, int]]] = {}  # (part, amount) of each group
    num_tokens = 0
    for group in groups:
        if num_tokens >= DIVERSITY_TOKENS:
            break
        completions = [episode.completion for episode in group.samples]
        sampled = [c.token_ids[c.loss_mask].astype(np.int64) for c in completions]
        pairs = [(tokens[:-1] << 32) | tokens[1:] for tokens in sampled]
        shares.setdefault("distinct_1", []).append(_distinct(sampled))
        shares.setdefault("distinct_2", []).append(_distinct(pairs))
        shares.setdefault("jaccard_distance", []).append(_jaccard(sampled))
        num_tokens += sum(map(len, sampled))
    metrics: dict[str, Metric] = {}
    for name, of_groups in shares.items():
        if measured := [(part, amount) for part, amount in of_groups if amount]:
            macro = fmean(part / amount for part, amount in measured)
            micro = sum(part for part, _ in measured) / sum(amount for _, amount in measured)
            metrics[f"diversity/{name}/macro"] = same_everywhere(macro)
            metrics[f"diversity/{name}/micro"] = same_everywhere(micro)
    return metrics


def _distinct(grams: list[np.ndarray]) -> tuple[float, int]:
    """The number of different n-grams, and of all."""
    ordered = np.sort(np.concatenate(grams)) if grams else np.empty(0)
    # np.unique hashes, which takes several times as long
    return float(np.count_nonzero(np.diff(ordered)) + min(len(ordered), 1)), len(ordered)


def _jaccard(completions: list[np.ndarray]) -> tuple[float, int]:
    """The summed distance over all pairs of completions with tokens, and the number of these pairs."""
    sets = [set(tokens.tolist()) for tokens in completions if len(tokens)]
    pairs = list(combinations(sets, 2))
    return sum(1 - len(a & b) / len(a | b) for a, b in pairs), len(pairs)


def conversation_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """`conversations/...` over the completions that used an environment. Empty without conversations."""
    completions = [episode.completion for episode in flat(groups)]
    conversations = [c for c in completions if c.turns or c.error is not None]
    if not conversations:
        return {}
    count = len(conversations)
    sampled = sum(c.num_sampled for c in conversations)
    tokens = sum(len(c.token_ids) for c in conversations)
    context_tokens = sum(trace.context_tokens for c in conversations for trace in c.traces)
    turns = [len(c.turns) for c in conversations]
    seconds = [turn.environment_seconds for c in conversations for turn in c.turns]
    metrics = {
        **describe("conversations/turns", turns, ("mean", "min", "max")),
        **describe("conversations/traces", [len(c.traces) for c in conversations], ("mean", "max")),
        **describe("conversations/environment_seconds", seconds, ("mean", "max")),
    }
    values = {
        "count": float(count),
        "differing_prompts": fmean(any(e.completion.prompt for e in g.samples) for g in groups),
        "env_errors": float(sum(c.error is not None for c in conversations)),
        "tokens_of_contexts": context_tokens / count,
        "tokens_sampled": sampled / count,
        "tokens_observed": (tokens - sampled) / count,
    }
    metrics |= {f"conversations/{name}": same_everywhere(value) for name, value in values.items()}
    columns = sorted({name for c in conversations for turn in c.turns for name in turn.columns})
    for name in columns:
        totals = [total for c in conversations if (total := _total(c, name)) is not None]
        if totals:
            metrics.setdefault(f"conversations/{name}", same_everywhere(fmean(totals)))
    return metrics


def _total(completion: Completion, column: str) -> float | None:
    """The sum of a logged number over a conversation; None if it was never a finite number."""
    cells = [turn.columns.get(column) for turn in completion.turns]
    numbers = [float(c) for c in cells if isinstance(c, (int, float)) and math.isfinite(c)]
    return sum(numbers) if numbers else None
