"""What the weights of the step's groups look like."""

import math
from collections.abc import Callable

from torchtitan_rl.types import Episode, Metric

from torchtitan_rl.metrics.summary import describe, mean, same_everywhere
from .weights import entropy, is_neutral


def group_weight_metrics(
    groups: list[list[Episode]], target_of: Callable[[list[Episode]], list[float]]
) -> dict[str, Metric]:
    """`maxent/...` and `groups/effective_rollouts`, `groups/incorrect_mass`.

    The weights' entropy is of the groups in the loss (its mean comes from the loss itself); the others count all groups
    with a weighted completion.
    """
    members = [[episode for episode in group if episode.weight > 0 or episode.in_loss] for group in groups]
    members = [group for group in members if group]
    if not members:
        return {}
    targets = [target_of(group) for group in members]
    entropies = [entropy([episode.weight for episode in group]) for group in members]
    incorrect = [math.fsum(episode.weight for episode in group if episode.reward <= 0) for group in members]
    metrics = describe("maxent/q_entropy", [entropy(q) for q in targets])
    metrics["maxent/neutral_fraction"] = same_everywhere(mean([float(is_neutral(q)) for q in targets]))
    metrics["groups/effective_rollouts"] = same_everywhere(mean([math.exp(value) for value in entropies]))
    metrics["groups/incorrect_mass"] = same_everywhere(mean(incorrect))
    learning = [(len(group), value) for group, value in zip(members, entropies, strict=True) if group[0].in_loss]
    metrics |= describe("maxent/weight_entropy", [value for _, value in learning], ("std", "min", "max"))
    shares = [value / math.log(size) for size, value in learning if size > 1]
    return metrics | describe("maxent/weight_entropy_normalized", shares, ("mean",))
