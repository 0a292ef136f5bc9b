"""Dr.GRPO's advantage."""

from dataclasses import dataclass

from .base import Advantage, centered


class GroupMean(Advantage):
    """A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783; TorchTitan's default."""

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        """No fields."""

    def of_group(self, rewards: list[float], step_rewards: list[float]) -> list[float]:
        return centered(rewards)
