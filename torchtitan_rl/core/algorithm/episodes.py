"""From scored groups to groups of episodes, and what a group says before any advantage."""

import math

from torchtitan_rl.core.algorithm.advantages import all_equal
from torchtitan_rl.core.types import Episode, Group, Normalizers, ScoredCompletion


def draft_episodes(groups: list[Group[ScoredCompletion]]) -> list[Group[Episode]]:
    """The same groups with an episode for each completion, without advantages yet.

    Raises:
        ValueError: a prompt_idx, or a sample_idx of one group, that comes twice.
    """
    check_unique([group.prompt.prompt_idx for group in groups], "two groups with prompt_idx")
    for group in groups:
        indices = [scored.completion.sample_idx for scored in group.samples]
        check_unique(indices, f"prompt {group.prompt.prompt_idx}: two completions with sample_idx")
    return [Group(prompt=group.prompt, samples=[Episode(scored=one) for one in group.samples]) for group in groups]


def check_unique(indices: list[int], what: str) -> None:
    """Raise ValueError naming the first index that comes twice."""
    seen: set[int] = set()
    for index in indices:
        if index in seen:
            raise ValueError(f"{what} {index}; each must be unique.")
        seen.add(index)


def has_preference(group: Group[ScoredCompletion] | Group[Episode]) -> bool:
    """Whether a group's rewards differ, before any penalty; rewards that are None, NaN or infinite take no part."""
    return not all_equal([one.reward for one in group.samples if one.reward is not None and math.isfinite(one.reward)])


def count_normalizers(groups: list[Group[Episode]], max_completion_tokens: int) -> Normalizers:
    """The counts that losses divide by, over one update's groups; only sampled tokens in the loss count."""
    lengths = [[e.completion.num_sampled for e in group.samples if e.in_loss] for group in groups]
    lengths = [[length for length in group if length] for group in lengths]
    return Normalizers(
        num_tokens=sum(map(sum, lengths)),
        num_sequences=sum(map(len, lengths)),
        num_groups=sum(map(bool, lengths)),
        max_completion_tokens=max_completion_tokens,
    )
