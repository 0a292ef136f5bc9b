"""SEED-GRPO: a group whose answers disagree moves the policy less."""

import math
from dataclasses import dataclass

from torchtitan.config import Configurable

from torchtitan_rl.types import Episode, Metric

from torchtitan_rl.run.errors import expect
from torchtitan_rl.metrics.summary import describe, same_everywhere


def semantic_entropy(answers: list[str | None], logprob_means: list[float]) -> float:
    """H = -sum_c p_c log p_c over clusters of equal answers, in nats; p_c the share of sum_i exp(l_i) in cluster c.

    Args:
        answers: [G]; None (no answer could be read) is a cluster of its own for each completion.
        logprob_means: [G] l_i, the completion's sampler log-probability divided by its length.
    """
    masses: dict[str | int, float] = {}
    largest = max(logprob_means)  # shares do not change with a common factor, and exp of very negative numbers is 0
    for index, (answer, logprob_mean) in enumerate(zip(answers, logprob_means, strict=True)):
        cluster = index if answer is None else answer
        masses[cluster] = masses.get(cluster, 0.0) + math.exp(logprob_mean - largest)
    total = math.fsum(masses.values())
    shares = [mass / total for mass in masses.values() if mass > 0]
    return -math.fsum(share * math.log(share) for share in shares)


class SeedGrpo(Configurable):
    """A <- A / (1 + alpha_eff H), alpha_eff = alpha / log G, H the group's semantic entropy. arXiv 2505.12346."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        alpha: float = 0.0417
        """Strength; at the largest possible entropy, log G, advantages are divided by 1 + alpha."""

        def __post_init__(self) -> None:
            expect(self.alpha >= 0, "algorithm.seed_grpo.alpha", self.alpha, "a number >= 0", "Use 0.0417.")

    def __init__(self, config: Config) -> None:
        self.alpha = config.alpha

    def entropy(self, group: list[Episode]) -> float:
        """The group's semantic entropy, in nats.

        A completion without tokens has l = 0; one whose log-probabilities are not finite is left out.
        """
        means = [math.fsum(episode.sampler_logprobs) / max(len(episode.sampler_logprobs), 1) for episode in group]
        known = [(episode.answer, mean) for episode, mean in zip(group, means, strict=True) if math.isfinite(mean)]
        return semantic_entropy([answer for answer, _ in known], [mean for _, mean in known]) if known else 0.0

    def effective_alpha(self, group_size: int) -> float:
        """alpha / log G, for G >= 2."""
        return self.alpha / math.log(group_size)

    def scale(self, group: list[Episode]) -> float:
        """The factor on the group's advantages, in (0, 1]; 1 for a group of one."""
        if len(group) < 2:
            return 1.0
        return 1 / (1 + self.effective_alpha(len(group)) * self.entropy(group))

    def metrics(self, groups: list[list[Episode]]) -> dict[str, Metric]:
        """`semantic_entropy/...` over groups of at least two; the maximum and alpha_eff are the largest group's."""
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return {}
        largest = max(len(group) for group in groups)
        metrics = describe("semantic_entropy", [self.entropy(group) for group in groups])
        metrics |= describe("semantic_entropy/scale", [self.scale(group) for group in groups], ("mean", "min", "max"))
        metrics["semantic_entropy/effective_alpha"] = same_everywhere(self.effective_alpha(largest))
        metrics["semantic_entropy/max_possible"] = same_everywhere(math.log(largest))
        return metrics
