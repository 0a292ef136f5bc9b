"""Advantages: pure functions of a group's rewards, in float64."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torchtitan_rl.core.config import OwnConfig, number


class Advantage(OwnConfig, ABC):
    """Turns each group's rewards into advantages. A subclass writes `of_group`; the rules all share are here.

    A None reward takes no part in any baseline and gets 0. A group whose rewards are all equal gets exactly 0, tested
    on the rewards themselves: 0.1, 0.1, 0.1 has a mean that is not 0.1 in floating point, and a standard deviation of
    1e-17 would be divided by.
    """

    def __call__(self, groups: list[list[float | None]]) -> list[list[float]]:
        """Every group's advantages, in the same shape as `groups`; NaN or infinite where the rewards overflow."""
        step_rewards = [reward for group in groups for reward in group if reward is not None]
        return [self._with_shared_rules(group, step_rewards) for group in groups]

    def of_turns(self, groups: list[list[list[float | None]]]) -> list[list[list[float]]]:
        """Every sample's advantages, one for each of its returns: those at one place are each other's baseline.

        A place that one sample alone reaches has nothing to compare with and gets 0.
        """
        most = max((len(returns) for group in groups for returns in group), default=0)
        found: list[list[list[float]]] = [[[] for _ in group] for group in groups]
        for turn in range(most):
            at_turn = [[returns[turn] if turn < len(returns) else None for returns in group] for group in groups]
            for samples, values in zip(found, self(at_turn), strict=True):
                for advantages, value in zip(samples, values, strict=True):
                    advantages.append(value)
        return [
            [advantages[: len(returns)] for advantages, returns in zip(samples, group, strict=True)]
            for samples, group in zip(found, groups, strict=True)
        ]

    def _with_shared_rules(self, group: list[float | None], step_rewards: list[float]) -> list[float]:
        rewards = [reward for reward in group if reward is not None]
        if all_equal(rewards):
            return [0.0] * len(group)
        values = iter(self.of_group(rewards, step_rewards))
        return [0.0 if reward is None else next(values) for reward in group]

    @abstractmethod
    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        """Advantages of one group of at least two rewards that are not all equal; `step_rewards` are all the step's."""


def all_equal(rewards: list[float]) -> bool:
    """Whether the rewards carry no preference: none, one, or all the same number."""
    return not rewards or min(rewards) == max(rewards)


def centered(rewards: list[float]) -> list[float]:
    """r_i - mean(r); infinite where the sum overflows, for the caller to find."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def sample_std(values: list[float]) -> float:
    """Standard deviation with N - 1; 0 for fewer than two values, infinite where the squares overflow."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(sum(difference * difference for difference in centered(values)) / (len(values) - 1))


def scaled(rewards: list[float], std: float, std_eps: float) -> list[float]:
    """(r_i - mean(r)) / (std + std_eps); NaN for a std that overflowed, which would make every advantage a silent 0."""
    if not math.isfinite(std):
        return [math.nan] * len(rewards)
    return [difference / (std + std_eps) for difference in centered(rewards)]


class GroupMean(Advantage):
    """A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783; TorchTitan's default."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return centered(rewards)


class Grpo(Advantage):
    """A_i = (r_i - mean(r)) / (s + std_eps), s the group's standard deviation with N - 1. GRPO, arXiv 2402.03300."""

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        std_eps: float = number(1e-4, above=0)
        """Added to the standard deviation, in units of reward."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return scaled(rewards, sample_std(rewards), self.config.std_eps)


class BatchStd(Grpo):
    """A_i = (r_i - mean of its group) / (S + std_eps), S the standard deviation with N - 1 of all the step's rewards.

    One divisor for every group, so an easy and a hard prompt keep their relative weight.
    """

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return scaled(rewards, sample_std(step_rewards), self.config.std_eps)


class Rloo(Advantage):
    """A_i = r_i - mean of the others' rewards = G / (G - 1) (r_i - mean(r)). RLOO, arXiv 2402.14740."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        scale = len(rewards) / (len(rewards) - 1)
        return [scale * difference for difference in centered(rewards)]
