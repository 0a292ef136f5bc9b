"""What came out of a step: lengths, endings, diversity. The same on every rank."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from torchtitan_rl.core.summary import describe, fraction, mean, same_everywhere
from torchtitan_rl.core.types import Episode, Group, Metric, flat

DIVERSITY_TOKENS = 50_000
"""Tokens of a step that diversity is measured on, in whole groups, so that it costs milliseconds at any size."""


def completion_metrics(groups: Sequence[Group[Episode]]) -> dict[str, Metric]:
    """Lengths in sampled tokens, of all, of those that ended by themselves, of right and wrong ones; how they ended.

    Keys over nothing (no completion ended by itself, nothing was judged) are absent.
    """
    episodes = flat(groups)
    if not episodes:
        return {}
    lengths = [episode.completion.num_sampled for episode in episodes]
    stopped = [episode.completion.finish_reason == "stop" for episode in episodes]
    verdicts = [episode.scored.correct for episode in episodes]
    ends = Counter(episode.completion.finish_reason for episode in episodes)
    spread = ("mean", "min", "max")
    return {
        **describe("completions/length", lengths, spread),
        **describe("completions/terminated_length", [n for n, ended in zip(lengths, stopped) if ended], spread),
        **describe("completions/right_length", [n for n, right in zip(lengths, verdicts) if right], ("mean",)),
        **describe("completions/wrong_length", [n for n, right in zip(lengths, verdicts) if right is False], ("mean",)),
        "completions/clipped_fraction": fraction([not ended for ended in stopped]),
        "completions/tokens": same_everywhere(float(sum(lengths))),
        "completions/prompt_tokens": same_everywhere(
            float(sum(len(group.prompt.token_ids) * len(group.samples) for group in groups))
        ),
        "completions/count": same_everywhere(float(len(episodes))),
        **{f"completions/finish_reason/{end}": same_everywhere(n / len(episodes)) for end, n in ends.items()},
    }


def diversity_metrics(groups: Sequence[Group[Episode]], max_tokens: int = DIVERSITY_TOKENS) -> dict[str, Metric]:
    """How much the completions of one prompt differ: distinct-1, distinct-2 and mean pairwise Jaccard distance.

    distinct-n is a group's number of different n-grams of sampled tokens over its number of n-grams; no n-gram crosses
    the boundary of a completion. The Jaccard distance of two completions is 1 - |A & B| / |A | B| of their sets of
    tokens.
    macro: the mean over groups; micro: over all n-grams, or pairs, of the groups together. Groups are taken in order
    until `max_tokens` is reached (one at least); diversity/groups says how many were.
    """
    taken: list[list[np.ndarray]] = []
    tokens = 0
    for group in groups:
        if taken and tokens >= max_tokens:
            break
        taken.append([episode.completion.sampled_ids.astype(np.int64) for episode in group.samples])
        tokens += sum(map(len, taken[-1]))
    metrics: dict[str, Metric] = {}
    for name, measure in (("distinct_1", _distinct_1), ("distinct_2", _distinct_2), ("jaccard_distance", _jaccard)):
        pairs = [pair for completions in taken if completions and (pair := measure(completions))[1]]
        if pairs:
            metrics[f"diversity/{name}/macro"] = same_everywhere(mean([part / amount for part, amount in pairs]))
            micro = sum(part for part, _ in pairs) / sum(amount for _, amount in pairs)
            metrics[f"diversity/{name}/micro"] = same_everywhere(micro)
    if taken:
        metrics["diversity/groups"] = same_everywhere(float(len(taken)))
    return metrics


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
