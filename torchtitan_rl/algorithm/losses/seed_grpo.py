"""SEED-GRPO: scales down the advantages of groups whose answers disagree."""

import math
from dataclasses import dataclass

from torchtitan_rl.algorithm.losses.maxent.weights import entropy, softmax
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.summary import describe
from torchtitan_rl.types import Episode, Group, Metric


def semantic_entropy(answers: list[str | None], logprob_means: list[float]) -> float:
    """Returns H = -sum_c p_c log p_c in nats, where p_c is the share of cluster c in sum_i exp(l_i).

    Args:
        answers: [G]; equal answers form a cluster, and each None (no answer could be extracted) is its own cluster.
        logprob_means: [G] l_i, the completion's sampler log-probability divided by its length.
    """
    shares: dict[str | int, float] = {}
    for index, (answer, share) in enumerate(zip(answers, softmax(logprob_means, 1.0), strict=True)):
        cluster = index if answer is None else answer
        shares[cluster] = shares.get(cluster, 0.0) + share
    return entropy([*shares.values()])


class SeedGrpo(OwnConfig):
    """A <- A / (1 + alpha_eff H), alpha_eff = alpha / log G. H is the entropy over the group's G answers with a
    reward and at least one sampled token.

    SEED-GRPO, arXiv 2505.12346, as its released code computes it; docs/papers.md describes the difference to the
    paper.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        alpha: float = number(0.0417, least=0)
        """Strength of the scaling. At the largest possible entropy, log G, advantages are divided by 1 + alpha."""

    def scale(self, group: Group[Episode]) -> float:
        """Returns the factor on the group's advantages, in (0, 1]; 1 for fewer than two members."""
        members = compared(group)
        if len(members) < 2:
            return 1.0
        return 1 / (1 + self.config.alpha / math.log(len(members)) * group_entropy(members))

    def metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Returns `semantic_entropy/...` over groups of at least two."""
        groups = [group for group in groups if len(compared(group)) > 1]
        entropies = [group_entropy(compared(group)) for group in groups]
        scales = [self.scale(group) for group in groups]
        metrics = describe("semantic_entropy", entropies)
        return metrics | describe("semantic_entropy/scale", scales, ("mean", "min", "max"))


def group_entropy(members: list[Episode]) -> float:
    """Returns the semantic entropy of completions with at least one sampled token, in nats."""
    completions = [member.completion for member in members]
    means = [math.fsum(c.sampled_logprobs.tolist()) / c.num_sampled for c in completions]
    return semantic_entropy([member.scored.answer for member in members], means)


def compared(group: Group[Episode]) -> list[Episode]:
    """Returns the completions whose answers are compared: those with a finite reward, finite log-probabilities and tokens."""
    return [
        e for e in group.samples if e.credit.shaped_reward is not None and e.completion.num_sampled
    ]
