"""What the step's episodes say about rewards, groups and advantages, before any forward pass."""

import math

from torchtitan_rl.types import Episode, Metric

from ..advantages import all_equal
from ..nonfinite import episode_fault
from .loss_metrics import LENGTH_BUCKETS, bucket_name
from torchtitan_rl.metrics.summary import describe, mean, same_everywhere


def finite_rewards(episodes: list[Episode]) -> list[float]:
    """The rewards that are numbers: neither None nor NaN nor infinite."""
    return [episode.reward for episode in episodes if episode.reward is not None and math.isfinite(episode.reward)]


def reward_metrics(episodes: list[Episode], entropy_coef: float) -> dict[str, Metric]:
    """`reward/...` over rollouts, and over each reward function's values."""
    metrics = describe("reward", finite_rewards(episodes), ("mean", "std", "min", "max", "quantiles"))
    functions = sorted({function for episode in episodes for function in episode.reward_breakdown})
    for function in functions:
        values = [episode.reward_breakdown.get(function) for episode in episodes]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        metrics |= describe(f"reward/{function}", numbers, ("mean", "std", "quantiles"))
    shaped = [episode.shaped_reward for episode in episodes if episode.shaped_reward is not None]
    metrics |= describe("reward/shaped", shaped, ("mean",))
    if entropy_coef > 0:
        bonus = [
            episode.shaped_reward - entropy_coef * mean(episode.sampler_logprobs)
            for episode in episodes
            if episode.shaped_reward is not None and episode.sampler_logprobs
        ]
        metrics |= describe("reward/with_entropy", bonus, ("mean",))
    return metrics


def group_metrics(groups: list[list[Episode]]) -> dict[str, Metric]:
    """`groups/...`: a reward <= 0 is wrong, > 0 is right; groups without any reward are left out."""
    rewards = [rewards for rewards in map(finite_rewards, groups) if rewards]
    if not rewards:
        return {}
    kinds = {
        "zero_variance": [all_equal(group) for group in rewards],
        "all_wrong": [max(group) <= 0 for group in rewards],
        "all_right": [min(group) > 0 for group in rewards],
        "mixed": [min(group) <= 0 < max(group) for group in rewards],
    }
    return {
        f"groups/{kind}_fraction": same_everywhere(mean([float(x) for x in where])) for kind, where in kinds.items()
    }


def advantage_metrics(episodes: list[Episode]) -> dict[str, Metric]:
    """`advantage/...` over the completions that take part in the loss."""
    advantages = [episode.advantage for episode in episodes if episode.in_loss]
    if not advantages:
        return {}
    metrics = describe("advantage", advantages)
    positive = mean([float(advantage > 0) for advantage in advantages])
    return metrics | {"advantage/positive_fraction": same_everywhere(positive)}


def participation_metrics(episodes: list[Episode], num_nonfinite: int) -> dict[str, Metric]:
    """How many completions and tokens take part in the loss, and how many were left out as not finite."""
    if not episodes:
        return {}
    metrics = {
        "loss/completion_fraction": same_everywhere(mean([float(episode.in_loss) for episode in episodes])),
        "nonfinite/completions": same_everywhere(float(num_nonfinite)),
    }
    lengths = [len(episode.token_ids) for episode in episodes if episode.in_loss]
    for bucket in LENGTH_BUCKETS:
        first, last = bucket
        tokens = sum(length for length in lengths if first <= length <= (last or math.inf))
        if tokens:
            metrics[f"policy/kl_k3/length_{bucket_name(bucket)}/tokens"] = same_everywhere(float(tokens))
    return metrics


def all_episode_metrics(episodes: list[Episode], groups: list[list[Episode]], entropy_coef: float) -> dict[str, Metric]:
    """Everything above; `groups` are the same episodes by prompt."""
    num_nonfinite = sum(episode_fault(episode) is not None for episode in episodes)
    metrics = reward_metrics(episodes, entropy_coef)
    metrics |= group_metrics(groups)
    metrics |= advantage_metrics(episodes)
    return metrics | participation_metrics(episodes, num_nonfinite)
