"""Advantages that compare a reward with its group's mean: GRPO's, Dr. GRPO's, Lite PPO's and RLOO's."""

from dataclasses import dataclass

from torchtitan_rl.algorithm.advantages.advantage import (
    Advantage,
    RewardedGroup,
    centered,
    sample_std,
    scaled,
)
from torchtitan_rl.fields.number import number


class Grpo(Advantage):
    """A_i = (r_i - mean(r)) / (s + std_eps), s the group's standard deviation with N - 1. GRPO, arXiv 2402.03300."""

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        std_eps: float = number(1e-4, above=0)
        """Added to the standard deviation, in units of reward."""

    def of_group(self, group: RewardedGroup) -> list[float]:
        return scaled(group.rewards, sample_std(group.rewards), self.config.std_eps)


class GroupMean(Advantage):
    """A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783; TorchTitan's default."""

    def of_group(self, group: RewardedGroup) -> list[float]:
        return centered(group.rewards)


class BatchStd(Grpo):
    """A_i = (r_i - mean of its group) / (S + std_eps), S the standard deviation with N - 1 of the whole step's rewards.

    All groups have the same divisor, so easy and hard prompts keep their relative weight. S covers every reward of the step,
    also of groups that `zero_variance` drops, so that dropping them changes no other group's advantages.
    """

    def of_group(self, group: RewardedGroup) -> list[float]:
        return scaled(group.rewards, sample_std(group.step_rewards), self.config.std_eps)


class Rloo(Advantage):
    """A_i = r_i - mean of the others' rewards = G / (G - 1) (r_i - mean(r)). RLOO, arXiv 2402.14740."""

    def of_group(self, group: RewardedGroup) -> list[float]:
        scale = len(group.rewards) / (len(group.rewards) - 1)
        return [scale * difference for difference in centered(group.rewards)]
