"""REINFORCE leave-one-out."""

from dataclasses import dataclass

from .base import Advantage, centered


class Rloo(Advantage):
    """A_i = r_i - mean of the others' rewards = G / (G - 1) (r_i - mean(r)). RLOO, arXiv 2402.14740."""

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        """No fields."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        scale = len(rewards) / (len(rewards) - 1)
        return [scale * difference for difference in centered(rewards)]
