"""A bonus in the reward for a completion's entropy, of MaxEnt-GRPO's authors."""

import math
from dataclasses import dataclass

import numpy as np

from torchtitan_rl.algorithm.advantages.advantage import all_equal
from torchtitan_rl.algorithm.advantages.grpo import Grpo
from torchtitan_rl.fields.number import number
from torchtitan_rl.types import Episode, Group


class EntropyBonus(Grpo):
    """Grpo's advantages of r_i + b_i, b_i = coef s(r) (h_i - mean(h)) / max(s(h), 1e-6), h_i = -mean_t log mu. MaxEnt-GRPO's authors.

    s(r) is the standard deviation of the step's rewards, 1 if they are equal; mean(h) and s(h) are the group's. s with N.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Grpo.Config):
        coef: float = number(0.1, least=0)
        """Weight of the bonus, in standard deviations of the step's rewards."""

    ignores = ("credit",)

    def of_step(
        self, rewards: list[list[float | None]], groups: list[Group[Episode]]
    ) -> list[list[float]]:
        known = [reward for group in rewards for reward in group if reward is not None]
        size = self.config.coef * (1.0 if all_equal(known) else float(np.std(known)))
        totals = [list(group_rewards) for group_rewards in rewards]
        for total, group in zip(totals, groups, strict=True):
            places = [i for i, reward in enumerate(total) if reward is not None]
            entropies: list[float] = []  # [rewarded]
            for i in places:
                completion = group.samples[i].completion
                surprise = -math.fsum(completion.sampled_logprobs.tolist())
                entropies.append(surprise / max(completion.num_sampled, 1))
            if not places:
                continue
            centered = np.array(entropies) - np.mean(entropies)  # [rewarded]
            bonuses = size * centered / max(np.std(entropies), 1e-6)  # [rewarded]
            for i, bonus in zip(places, bonuses.tolist(), strict=True):
                group.samples[i].credit.columns["entropy_bonus"] = bonus
                total[i] += bonus
        return super().of_step(totals, groups)
