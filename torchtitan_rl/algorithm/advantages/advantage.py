"""Advantages: functions of a group's rewards, computed in float64."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torchtitan_rl.algorithm.unused import ObjectivePart
from torchtitan_rl.types import Episode, Group


class RewardedGroup(NamedTuple):
    """The samples of one prompt that have a reward. At least two rewards differ."""

    rewards: tuple[float, ...]
    """The shaped reward of each sample; with credit "turn" the returns at one turn."""
    episodes: list[Episode]
    """The samples, in the order of `rewards`: their lengths, answers, log-probabilities."""
    step_rewards: tuple[float, ...]
    """The same of the whole step."""


class Advantage(ObjectivePart, ABC):
    """Turns each group's rewards into advantages. A subclass writes `of_group`; the shared rules are here.

    A reward of None is left out of every baseline and gets advantage 0. If all rewards of a group are equal
    (`all_equal`), every advantage is exactly 0. The test compares the rewards themselves: in floating point the mean
    of 0.1, 0.1, 0.1 is not 0.1, and the standard deviation 1e-17 would become a divisor.
    """

    def check_rewards(self, rewards: Sequence[float]) -> None:
        """Raise UserError for a reward that has no advantage. Called with an evaluation's rewards too."""

    def of_step(
        self, rewards: list[list[float | None]], groups: list[Group[Episode]]
    ) -> list[list[float]]:
        """The advantages of every group, in the shape of `rewards`; NaN or infinite if the rewards overflow.

        Args:
            rewards: one for each sample of `groups`.
        """
        step_rewards: list[float] = []
        for group_rewards in rewards:
            step_rewards += [reward for reward in group_rewards if reward is not None]
        self.check_rewards(step_rewards)
        advantages: list[list[float]] = []
        for group_rewards, group in zip(rewards, groups, strict=True):
            of_group = self._with_shared_rules(group_rewards, group.samples, step_rewards)
            advantages.append(of_group)
        return advantages

    def _with_shared_rules(
        self, rewards: list[float | None], episodes: list[Episode], step_rewards: list[float]
    ) -> list[float]:
        """The advantages of one group: 0 without a reward, and everywhere if all rewards are equal."""
        places = [i for i, reward in enumerate(rewards) if reward is not None]
        group = RewardedGroup(
            rewards=tuple(rewards[i] for i in places),
            episodes=[episodes[i] for i in places],
            step_rewards=tuple(step_rewards),
        )
        if all_equal(group.rewards):
            return [0.0] * len(rewards)
        advantages = [0.0] * len(rewards)
        of_group = self.of_group(group)[:]  # raises for a set, which has no order
        for i, value in zip(places, of_group, strict=True):
            advantages[i] = float(value)
        return advantages

    @abstractmethod
    def of_group(self, group: RewardedGroup) -> list[float]:
        """The advantages of one group, in the order of its rewards."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by rounding at most: relative 1e-8, absolute 1e-14. True for no reward or one.

    Example: (0.1 + 0.2) + 0.3 and (0.3 + 0.2) + 0.1 are different floats, but not a preference.
    """
    if not rewards:
        return True
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-8, abs_tol=1e-14)


def centered(rewards: Sequence[float]) -> list[float]:
    """r_i - mean(r); infinite if the sum overflows, which the caller must check."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with N - 1; 0 for fewer than two values, infinite if the squares overflow."""
    if len(values) < 2:
        return 0.0
    squares = [difference * difference for difference in centered(values)]
    return math.sqrt(sum(squares) / (len(values) - 1))


def scaled(rewards: Sequence[float], std: float, std_eps: float) -> list[float]:
    """(r_i - mean(r)) / (std + std_eps); NaN if std overflowed, because dividing by infinity would hide it as 0."""
    if not math.isfinite(std):
        return [math.nan] * len(rewards)
    return [difference / (std + std_eps) for difference in centered(rewards)]
