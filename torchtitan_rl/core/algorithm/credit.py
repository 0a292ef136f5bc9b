"""What an advantage is of: a whole completion, or each turn of a conversation."""

from itertools import accumulate

from torchtitan_rl.core.types import Episode


def whole_returns(episode: Episode) -> list[float | None]:
    """One return: the shaped reward."""
    return [episode.credit.shaped_reward]


def turn_returns(episode: Episode) -> list[float | None]:
    """R_k = the shaped reward less what the turns before k earned: what was earned from turn k on. One without turns.

    Example: turn rewards 0.5, 0.2 and 1.0 for the whole conversation, in sum 1.7, give [1.7, 1.2].
    """
    if episode.credit.shaped_reward is None or not episode.scored.turn_rewards:
        return [episode.credit.shaped_reward] * max(len(episode.completion.turns), 1)
    earned = accumulate(episode.scored.turn_rewards[:-1], initial=0.0)
    return [episode.credit.shaped_reward - before for before in earned]


def set_advantage(episode: Episode, advantages: list[float]) -> None:
    """Give the episode its advantage: one for all tokens, or one for each turn and their mean over sampled tokens."""
    if len(advantages) == 1:
        episode.credit.advantage = advantages[0]
        return
    lengths = [turn.num_tokens for turn in episode.completion.turns]
    episode.credit.turn_advantages = tuple(advantages)
    weighted = sum(value * length for value, length in zip(advantages, lengths, strict=True))
    episode.credit.advantage = weighted / max(sum(lengths), 1)
