"""The protocol of an advantage: a pure function of one group's rewards."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torchtitan.config import Configurable


class Advantage(Configurable, ABC):
    """Turns each group's rewards into advantages. A subclass writes `of_group`; the rules all share are here.

    A None reward takes no part in any baseline and gets 0. A group whose rewards are all equal gets exactly 0, tested
    on the rewards themselves: 0.1, 0.1, 0.1 has a mean that is not 0.1 in floating point, and a standard deviation of
    1e-17 would be divided by.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, groups: list[list[float | None]]) -> list[list[float]]:
        """Every group's advantages, in the same shape as `groups`."""
        step_rewards = [reward for group in groups for reward in group if reward is not None]
        return [self._with_shared_rules(group, step_rewards) for group in groups]

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
    """Standard deviation with N - 1; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(sum(difference * difference for difference in centered(values)) / (len(values) - 1))
