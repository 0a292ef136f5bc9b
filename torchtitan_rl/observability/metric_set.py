"""The metrics that say what came out of a step: completions, diversity, evaluation. docs/metrics.md has every formula.

Pure functions of a list of episodes. What every rank holds alike must be recorded by one rank alone, because counts
are summed over ranks.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from torchtitan_rl.observability.collector import record_metric
from torchtitan_rl.types import Episode, Metric

DIVERSITY_TOKENS = 50_000
"""Tokens of a step that diversity is measured on, in whole groups, so that it costs milliseconds at any size."""


def record_metrics(metrics: dict[str, Metric]) -> None:
    """Records each under its key."""
    for key, metric in metrics.items():
        record_metric(key, metric.value, metric.reduction, metric.weight)


def completion_metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Lengths in tokens, of all completions and of those that ended by themselves, and how they ended.

    The keys of terminated completions are absent when none did; all keys are when there are no episodes.
    """
    if not episodes:
        return {}
    count = len(episodes)
    lengths = [len(episode.token_ids) for episode in episodes]
    terminated = [len(episode.token_ids) for episode in episodes if episode.finish_reason == "stop"]
    metrics = {
        **_lengths("completions/length", lengths),
        **_lengths("completions/terminated_length", terminated),
        "completions/clipped_fraction": Metric(1 - len(terminated) / count, weight=count),
        "completions/tokens": Metric(float(sum(lengths)), "sum"),
        "completions/prompt_tokens": Metric(float(sum(len(episode.prompt_token_ids) for episode in episodes)), "sum"),
        "completions/count": Metric(float(count), "sum"),
    }
    for reason, found in Counter(episode.finish_reason for episode in episodes).items():
        metrics[f"completions/finish_reason/{reason}"] = Metric(found / count, weight=count)
    return metrics


def diversity_metrics(episodes: Sequence[Episode], max_tokens: int = DIVERSITY_TOKENS) -> dict[str, Metric]:
    """How much the completions of one prompt differ: distinct-1, distinct-2 and mean pairwise Jaccard distance.

    distinct-n is a group's number of different n-grams of tokens over its number of n-grams; no n-gram crosses the
    boundary of a completion. The Jaccard distance of two completions is 1 - |A & B| / |A | B| of their sets of tokens.
    macro: the mean over groups; micro: over all n-grams, or pairs, of the groups together. Groups are taken in order
    until `max_tokens` is reached (one at least); diversity/groups says how many were.
    """
    groups: dict[int, list[np.ndarray]] = {}
    for group in _within(episodes, max_tokens):
        groups[group[0].prompt_idx] = [np.asarray(episode.token_ids, dtype=np.int64) for episode in group]
    metrics: dict[str, Metric] = {}
    for name, measure in (("distinct_1", _distinct_1), ("distinct_2", _distinct_2), ("jaccard_distance", _jaccard)):
        pairs = [pair for completions in groups.values() if (pair := measure(completions))[1]]
        if pairs:
            total = sum(amount for _, amount in pairs)
            macro = fmean(part / amount for part, amount in pairs)
            metrics[f"diversity/{name}/macro"] = Metric(macro, weight=len(pairs))
            metrics[f"diversity/{name}/micro"] = Metric(sum(part for part, _ in pairs) / total, weight=total)
    if groups:
        metrics["diversity/groups"] = Metric(float(len(groups)), "sum")
    return metrics


def is_correct(episode: Episode) -> bool:
    """Whether the extracted answer is the expected one, spaces around them aside."""
    return episode.answer is not None and episode.answer.strip() == episode.expected_answer.strip()


def evaluation_metrics(
    episodes: Sequence[Episode], *, prefix: str = "evaluation", correct: Callable[[Episode], bool] = is_correct
) -> dict[str, Metric]:
    """Accuracy, mean@n and pass@k over prompts, reward, length and format rate of held-out episodes.

    pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) for a prompt with c of n samples correct, averaged over
    the prompts with n >= k, for k = 2, 4, 8, ... and the largest n; mean@n is each prompt's share of correct samples,
    averaged over prompts, for groups of n > 1. `prefix` tells several evaluations apart ("evaluation/sampled").
    """
    if not episodes:
        return {}
    groups: dict[int, list[bool]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_idx, []).append(correct(episode))
    count = len(episodes)
    hits = sum(sum(group) for group in groups.values())
    metrics = {
        f"{prefix}/accuracy": Metric(hits / count, weight=count),
        f"{prefix}/length": Metric(fmean(len(episode.token_ids) for episode in episodes), weight=count),
        f"{prefix}/format_rate": Metric(sum(episode.answer is not None for episode in episodes) / count, weight=count),
    }
    rewards = [e.reward for e in episodes if e.reward is not None and math.isfinite(e.reward)]
    if rewards:
        metrics[f"{prefix}/reward"] = Metric(fmean(rewards), weight=len(rewards))
    largest = max(len(group) for group in groups.values())
    if largest > 1:
        shares = [sum(group) / len(group) for group in groups.values()]
        metrics[f"{prefix}/mean@{largest}"] = Metric(fmean(shares), weight=len(shares))
    for k in sorted({2**power for power in range(1, largest.bit_length()) if 2**power <= largest} | {largest} - {1}):
        estimates = [_pass_at(k, len(group), sum(group)) for group in groups.values() if len(group) >= k]
        metrics[f"{prefix}/pass@{k}"] = Metric(fmean(estimates), weight=len(estimates))
    return metrics


def _lengths(key: str, lengths: list[int]) -> dict[str, Metric]:
    if not lengths:
        return {}
    return {
        f"{key}/mean": Metric(fmean(lengths), weight=len(lengths)),
        f"{key}/min": Metric(float(min(lengths)), "min"),
        f"{key}/max": Metric(float(max(lengths)), "max"),
    }


def _within(episodes: Sequence[Episode], max_tokens: int) -> list[list[Episode]]:
    """Whole groups in order, until their tokens reach `max_tokens`."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_idx, []).append(episode)
    taken: list[list[Episode]] = []
    tokens = 0
    for group in groups.values():
        if taken and tokens >= max_tokens:
            break
        taken.append(group)
        tokens += sum(len(episode.token_ids) for episode in group)
    return taken


def _distinct_1(completions: list[np.ndarray]) -> tuple[float, int]:
    tokens = np.concatenate(completions)
    return float(len(_different(tokens))), len(tokens)


def _distinct_2(completions: list[np.ndarray]) -> tuple[float, int]:
    bigrams = np.concatenate([(tokens[:-1] << 32) | tokens[1:] for tokens in completions])
    return float(len(_different(bigrams))), len(bigrams)


def _different(values: np.ndarray) -> np.ndarray:
    """Each value once, sorted: several times as fast as np.unique, which hashes."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _jaccard(completions: list[np.ndarray]) -> tuple[float, int]:
    """The summed distance of all pairs of completions with a token, and the number of those pairs."""
    sets = [_different(tokens) for tokens in completions if len(tokens)]
    if len(sets) < 2:
        return 0.0, 0
    vocabulary = _different(np.concatenate(sets))
    present = np.zeros((len(sets), len(vocabulary)), dtype=np.float32)
    for row, tokens in enumerate(sets):
        present[row, np.searchsorted(vocabulary, tokens)] = 1.0
    shared = present @ present.T
    sizes = present.sum(axis=1)
    union = sizes[:, None] + sizes[None, :] - shared
    upper = np.triu_indices(len(sets), 1)
    return float((1.0 - shared[upper] / union[upper]).sum()), len(upper[0])


def _pass_at(k: int, n: int, c: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
