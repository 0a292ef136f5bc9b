"""Metrics of a step's rewards, right and wrong answers, and advantages. Equal on every rank."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_rl.algorithm.advantages.advantage import all_equal
from torchtitan_rl.observe.sample_rows import update_masses
from torchtitan_rl.summary import describe, same_everywhere
from torchtitan_rl.types import Episode, Group, Metric, flat

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm

Groups = Sequence[Group[Episode]]


def finite_rewards(episodes: Sequence[Episode]) -> list[float]:
    return _finite([episode.reward for episode in episodes])


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def judgements(episodes: Sequence[Episode]) -> list[bool]:
    """The task's judgement of each answer that it judged."""
    return [episode.scored.correct for episode in episodes if episode.scored.correct is not None]


def fraction(where: Sequence[bool]) -> Metric:
    """The share of true values among at least one."""
    return same_everywhere(sum(where) / len(where))


def clipped_fraction(episodes: Sequence[Episode]) -> Metric:
    return fraction([episode.completion.finish_reason != "stop" for episode in episodes])


def reward_metrics(groups: Groups) -> dict[str, Metric]:
    """`reward/...` over rollouts, within groups and for each reward function. `RunObserver.step` adds the quantiles."""
    episodes = flat(groups)
    metrics = describe("reward", finite_rewards(episodes))
    in_groups = [rewards for group in groups if (rewards := finite_rewards(group.samples))]
    if in_groups:
        stds = [float(np.std(rewards)) for rewards in in_groups]
        metrics["reward/group_std"] = same_everywhere(fmean(stds))
    for function in sorted({name for e in episodes for name in e.scored.reward_breakdown}):
        values = [episode.scored.reward_breakdown.get(function) for episode in episodes]
        metrics |= describe(f"reward/{function}", _finite(values), ("mean", "std"))
    credits = [episode.credit for episode in episodes]
    shaped = [c.shaped_reward for c in credits if c.shaped_reward is not None]
    bonuses = [c.columns["entropy_bonus"] for c in credits if "entropy_bonus" in c.columns]
    if bonuses:
        scale = 1.0 if all_equal(shaped) else float(np.std(shaped))
        metrics |= describe("entropy_bonus", bonuses, ("mean", "std"))
        metrics["entropy_bonus/reward_std"] = same_everywhere(scale)
    if shaped:
        metrics["reward/shaped_mean"] = same_everywhere(fmean(shaped))
    return metrics


def group_metrics(groups: Groups, algorithm: "Algorithm") -> dict[str, Metric]:
    """`groups/...` and `train/accuracy`. Right and wrong are the task's judgement; without it the keys are absent."""
    metrics: dict[str, Metric] = {}
    if rewarded := [group for group in groups if finite_rewards(group.samples)]:
        differs = algorithm.credit.rewards_differ
        equal = [not differs([episode.scored for episode in g.samples]) for g in rewarded]
        metrics["groups/zero_variance_fraction"] = fraction(equal)
    judged = [answers for group in groups if (answers := judgements(group.samples))]
    if judged:
        metrics["groups/all_wrong_fraction"] = fraction([not any(group) for group in judged])
        metrics["groups/all_right_fraction"] = fraction([all(group) for group in judged])
        metrics["groups/mixed_fraction"] = fraction([len(set(group)) == 2 for group in judged])
        metrics["train/accuracy"] = fraction([right for group in judged for right in group])
    return metrics


def groups_by_task(groups: Groups) -> dict[str, list[Group[Episode]]]:
    """The groups of each member of a mixture; empty if there is only one task."""
    names = sorted({group.prompt.task for group in groups} - {""})
    return {name: [group for group in groups if group.prompt.task == name] for name in names}


def task_metrics(groups: Groups, prefix: str, algorithm: "Algorithm") -> dict[str, Metric]:
    """Metrics of one member of a mixture: `<prefix>/prompts`, `<prefix>/reward`, `<prefix>/accuracy` and so on."""
    episodes = flat(groups)
    metrics = {
        "prompts": same_everywhere(float(len(groups))),
        "length": same_everywhere(fmean([episode.completion.num_sampled for episode in episodes])),
        "clipped_fraction": clipped_fraction(episodes),
    }
    if rewards := finite_rewards(episodes):
        metrics["reward"] = same_everywhere(fmean(rewards))
    named = group_metrics(groups, algorithm)
    for name in ("groups/zero_variance_fraction", "train/accuracy"):
        if name in named:
            metrics[name.partition("/")[2]] = named[name]
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def advantage_metrics(groups: Groups) -> dict[str, Metric]:
    """`advantage/...` over the completions in the loss; what is right and wrong in their groups' updates."""
    advantages = [episode.credit.advantage for episode in flat(groups) if episode.in_loss]
    metrics = describe("advantage", advantages)
    if advantages:
        positive = [advantage > 0 for advantage in advantages]
        metrics["advantage/positive_fraction"] = fraction(positive)
    effective, incorrect = [], []
    for group in groups:
        masses = zip(update_masses(group.samples), group.samples, strict=True)
        if update := [(mass, episode) for mass, episode in masses if mass > 0]:
            effective.append(math.exp(-math.fsum(mass * math.log(mass) for mass, _ in update)))
            incorrect.append(math.fsum(mass for mass, episode in update if is_wrong(episode)))
    if effective:
        metrics["groups/effective_rollouts"] = same_everywhere(fmean(effective))
        metrics["groups/incorrect_mass"] = same_everywhere(fmean(incorrect))
    return metrics


def is_wrong(episode: Episode) -> bool:
    """Whether the task judged the answer wrong; without a judgement, whether there is a reward and it is <= 0."""
    if episode.scored.correct is not None:
        return not episode.scored.correct
    return episode.reward is not None and episode.reward <= 0


def participation_metrics(groups: Groups) -> dict[str, Metric]:
    """The share of completions in the loss, and the shares left out by reason."""
    episodes = flat(groups)
    if not episodes:
        return {}
    # The text after the colon names the number that is not finite. It would give as many keys as there are tokens.
    left_out = [e.credit.left_out.partition(":")[0] for e in episodes if not e.in_loss]
    reasons = Counter(reason.replace(" ", "_") for reason in left_out)
    return {
        "loss/completion_fraction": fraction([episode.in_loss for episode in episodes]),
        **{
            f"loss/left_out/{name}": same_everywhere(count / len(episodes))
            for name, count in reasons.items()
        },
        "nonfinite/completions": same_everywhere(float(reasons["not_finite"])),
    }
