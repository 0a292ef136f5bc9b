"""GDPO: each reward function is normalised by itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.algorithm.advantages.advantage import all_equal, sample_std, scaled
from torchtitan_rl.algorithm.advantages.grpo import Grpo
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import MANY, number
from torchtitan_rl.types import Episode, Group

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm


class Gdpo(Grpo):
    """A_i = (a_i - mean(a)) / (s(a) + std_eps) over the step, a_i = sum_k w_k (r_ik - mean_g(r_k)) / (s_g(r_k) + std_eps).

    Each reward function k is normalised in the group by itself, so that (1, 0) and (0, 1) differ although their sums are equal.
    s with N - 1. A penalty for length is one more function, of weight 1. GDPO, arXiv 2601.05242.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Grpo.Config):
        weights: dict[str, float] = number({}, least=-MANY, most=MANY)
        """Weights w_k by the reward function's name, 1 for others: those of `grader.weights`."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            Grpo.Config.check_objective(self, objective)
            kl, cut_reward = objective.kl, objective.truncation.cut_reward
            remedy = "Gdpo divides a penalty by its spread, so its size has no effect."
            in_loss = kl.coef == 0 or kl.placement == "loss"
            expect(in_loss, "algorithm.kl.placement", kl.placement, '"loss" with Gdpo', remedy)
            field = "algorithm.truncation.cut_reward"
            expect(cut_reward == 0, field, cut_reward, "0 with Gdpo", remedy)

    ignores = ("credit", "zero_variance")

    def of_step(
        self, rewards: list[list[float | None]], groups: list[Group[Episode]]
    ) -> list[list[float]]:
        sums: list[list[float | None]] = []
        for group_rewards, group in zip(rewards, groups, strict=True):
            sums.append(self._group_sums(group_rewards, group))
        # Every group's sum is 0, and so is the step's mean. To subtract its rounding would move groups of equal rewards from 0.
        known = [total for group_sums in sums for total in group_sums if total is not None]
        divisor = sample_std(known) + self.config.std_eps
        return [[(total or 0.0) / divisor for total in group_sums] for group_sums in sums]

    def _group_sums(self, rewards: list[float | None], group: Group[Episode]) -> list[float | None]:
        """a_i of each sample; None without a reward, and 0 everywhere if all are equal."""
        rewarded = [i for i, reward in enumerate(rewards) if reward is not None]
        sums = dict.fromkeys(rewarded, 0.0)
        for weight, values in self._functions([group.samples[i] for i in rewarded]):
            places = [i for i, value in zip(rewarded, values, strict=True) if value is not None]
            normalized = self._normalized([value for value in values if value is not None])
            for i, value in zip(places, normalized, strict=True):
                sums[i] += weight * value
        if all_equal([*sums.values()]):
            sums = dict.fromkeys(rewarded, 0.0)
        return [sums.get(i) for i in range(len(rewards))]

    def _normalized(self, values: list[float]) -> list[float]:
        """(v_i - mean(v)) / (s(v) + std_eps); 0 if all are equal."""
        if all_equal(values):
            return [0.0] * len(values)
        return scaled(values, sample_std(values), self.config.std_eps)

    def _functions(self, episodes: list[Episode]) -> list[tuple[float, list[float | None]]]:
        """Each function's weight and its values for `episodes`; the last is the penalty."""
        names = sorted({name for episode in episodes for name in episode.scored.reward_breakdown})
        if not names:
            return [(1.0, [episode.credit.shaped_reward for episode in episodes])]
        functions: list[tuple[float, list[float | None]]] = []
        for name in names:
            weight = self.config.weights.get(name, 1.0)
            if weight != 0:
                functions.append((weight, [e.scored.reward_breakdown.get(name) for e in episodes]))
        return [*functions, (1.0, [e.credit.shaped_reward - e.reward for e in episodes])]
