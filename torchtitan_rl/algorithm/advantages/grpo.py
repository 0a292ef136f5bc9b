"""GRPO's advantage, and the same with the step's standard deviation."""

from dataclasses import dataclass

from torchtitan_rl.run.errors import expect
from .base import Advantage, centered, sample_std


class Grpo(Advantage):
    """A_i = (r_i - mean(r)) / (s + std_eps), s the group's standard deviation with N - 1. GRPO, arXiv 2402.03300."""

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        std_eps: float = 1e-4
        """Added to the standard deviation, in units of reward."""

        def __post_init__(self) -> None:
            expect(self.std_eps > 0, "algorithm.advantage.std_eps", self.std_eps, "a number > 0", "Use 1e-4.")

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return scaled(rewards, sample_std(rewards), self.config.std_eps)


class BatchStd(Advantage):
    """A_i = (r_i - mean of its group) / (S + std_eps), S the standard deviation with N - 1 of all the step's rewards.

    One divisor for every group, so an easy and a hard prompt keep their relative weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Grpo.Config):
        """The fields of `Grpo.Config`."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return scaled(rewards, sample_std(step_rewards), self.config.std_eps)


def scaled(rewards: list[float], std: float, std_eps: float) -> list[float]:
    """(r_i - mean(r)) / (std + std_eps)."""
    return [difference / (std + std_eps) for difference in centered(rewards)]
