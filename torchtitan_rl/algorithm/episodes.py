"""Episodes from scored completions, and their returns: one for the whole, or one for each turn."""

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest

import numpy as np

from torchtitan_rl.algorithm.advantages.advantage import all_equal
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Episode, Group, ScoredCompletion


def draft_episodes(groups: list[Group[ScoredCompletion]]) -> list[Group[Episode]]:
    """The same groups with an episode for each completion, still without advantages.

    Raises ValueError if two have the same prompt_idx: a pack would read one's prompt for both.
    """
    indices = [group.prompt.prompt_idx for group in groups]
    if len(set(indices)) < len(indices):
        raise ValueError(f"prompt_idx must differ between a step's groups, but they are {indices}")
    drafts: list[Group[Episode]] = []
    for group in groups:
        episodes = [Episode(scored=scored) for scored in group.samples]
        drafts.append(Group(prompt=group.prompt, samples=episodes))
    return drafts


def differ(returns: list[list[float | None]]) -> bool:
    """Whether the k-th returns of a group's samples differ, for any k. None, NaN and infinity are ignored."""
    for kth in zip_longest(*returns):
        if not all_equal([value for value in kth if value is not None and math.isfinite(value)]):
            return True
    return False


def turn_returns(scored: ScoredCompletion, total: float | None) -> list[float | None]:
    """R_k = total - rewards of the turns before k: the reward from turn k on. At least one return.

    Example: turn rewards 0.5 and 0.2, and 1.0 for the whole conversation (1.7 in total), give [1.7, 1.2].
    """
    if total is None or not scored.turn_rewards:
        return [total] * max(len(scored.completion.turns), 1)
    before = accumulate(scored.turn_rewards[:-1], initial=0.0)
    return [total - earned for earned in before]


def set_token_advantages(episode: Episode, advantages: Sequence[float] | np.ndarray) -> None:
    """Give each token an advantage of its own, [L], in place of the episode's. Called by a loss's `assign_credit`.

    Values of tokens that the policy did not sample are ignored. Raises UserError unless there is one for each token.
    """
    values = np.asarray(advantages, dtype=np.float32)  # [L]
    mask = episode.completion.loss_mask  # [L]
    if values.shape != mask.shape:
        raise UserError(
            f"set_token_advantages: {list(values.shape)} values for {len(mask)} tokens of sample "
            f"{episode.completion.sample_idx}: expected one for each token of the completion."
        )
    episode.credit.token_advantages = values
    episode.credit.turn_advantages = None
    episode.credit.advantage = 0.0
    if mask.any():
        episode.credit.advantage = float(values[mask].mean())
