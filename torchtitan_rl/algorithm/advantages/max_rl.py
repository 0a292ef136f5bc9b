"""MaxRL: harder prompts weigh more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.algorithm.advantages.advantage import Advantage, RewardedGroup, centered
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import MANY, number

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm


class MaxRl(Advantage):
    """A_i = (r_i - mean(r)) / (mean(r) - lowest), and 0 where the mean is `lowest`. MaxRL, arXiv 2602.02710, whose rewards are 0 and 1.

    Its expected gradient is that of the first G - 1 terms of log p = -sum_k (1 - p)^k / k, p the chance of a right answer, so that a
    prompt that is seldom answered weighs up to 1 / p times as much.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Advantage.Config):
        lowest: float = number(0.0, least=-MANY, most=MANY)
        """The reward of a wrong answer, and the least of all: -1 where the task gives +1 and -1. A lower one ends the
        run when it is graded: most often in the evaluation before step 1."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            kl, cut = objective.kl, objective.truncation
            bounded = kl.coef == 0 or kl.placement == "loss"
            remedy = "A KL has no bound, so no reward is the lowest."
            expect(bounded, "algorithm.kl.placement", kl.placement, '"loss" with MaxRl', remedy)
            least = cut.cut_reward - (cut.mode == "penalty")
            expected = f"at most {least:g}, the penalty of a wrong answer that was cut"
            remedy = "Lower it, or use another truncation."
            expect(
                self.lowest <= least, "algorithm.advantage.lowest", self.lowest, expected, remedy
            )

    def check_rewards(self, rewards: Sequence[float]) -> None:
        lowest, least = self.config.lowest, min(filter(math.isfinite, rewards), default=math.inf)
        remedy = "Set it to the least that a completion can get, penalties included."
        expected = f"at most {least:g}, a completion's reward"
        expect(least >= lowest - 1e-6, "algorithm.advantage.lowest", lowest, expected, remedy)

    def of_group(self, group: RewardedGroup) -> list[float]:
        above = sum(group.rewards) / len(group.rewards) - self.config.lowest
        return [difference / above if above > 0 else 0.0 for difference in centered(group.rewards)]
