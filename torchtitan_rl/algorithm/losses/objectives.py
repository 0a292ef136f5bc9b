"""Advantages, losses, aggregations and corrections that one picks by name beside the core's own.

Advantages: GroupMean, BatchStd, Rloo, MaxRl, Gdpo, EntropyBonus. Losses: Gspo, Gmpo, Cispo, Dppo, Sapo, Vespo, Reinforce.
Aggregations: SeqMeanTokenMean, SeqSumConst. Corrections: TokenTruncate, SequenceTruncate, TokenMask, SequenceMask. algorithm/losses/modifiers.py has masks, penalties and baselines on top of a loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.algorithm.advantages import (
    Advantage,
    Grpo,
    RewardedGroup,
    all_equal,
    centered,
    sample_std,
    scaled,
)
from torchtitan_rl.algorithm.losses.loss import (
    LOG_RATIO_LIMIT,
    Aggregation,
    Clip,
    LossInputs,
    Sequences,
    TokenLoss,
    safe_exp,
)
from torchtitan_rl.algorithm.mismatch import Correction, Mismatch
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import MANY, number
from torchtitan_rl.types import Episode, Group

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm


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
            bounded, remedy = (
                kl.coef == 0 or kl.placement == "loss",
                "A KL has no bound, so no reward is the lowest.",
            )
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
            for name, only in {"credit": "episode", "zero_variance": "keep"}.items():
                value, remedy = (
                    getattr(objective, name),
                    "Gdpo compares functions, of whole completions. Leave it out.",
                )
                expect(value == only, f"algorithm.{name}", value, f"{only} with Gdpo", remedy)
            kl, cut_reward = objective.kl, objective.truncation.cut_reward
            remedy = "Gdpo divides a penalty by its spread, so its size has no effect."
            in_loss = kl.coef == 0 or kl.placement == "loss"
            expect(in_loss, "algorithm.kl.placement", kl.placement, '"loss" with Gdpo', remedy)
            expect(
                cut_reward == 0,
                "algorithm.truncation.cut_reward",
                cut_reward,
                "0 with Gdpo",
                remedy,
            )

    def of_step(
        self, rewards: list[list[float | None]], groups: list[Group[Episode]]
    ) -> list[list[float]]:
        summed: list[list[float | None]] = []
        for of_group, group in zip(rewards, groups, strict=True):
            totals = [None if reward is None else 0.0 for reward in of_group]
            rewarded = [i for i, reward in enumerate(of_group) if reward is not None]
            for weight, values in self._functions([group.samples[i] for i in rewarded]):
                scored = {
                    i: value for i, value in zip(rewarded, values, strict=True) if value is not None
                }
                for i, value in zip(scored, self._normalized(list(scored.values())), strict=True):
                    totals[i] += weight * value
            equal = all_equal([total for total in totals if total is not None])
            summed.append([None if total is None else 0.0 if equal else total for total in totals])
        # Every group's sum is 0, and so is the step's mean. To subtract its rounding would move groups of equal rewards from 0.
        known = [total for totals in summed for total in totals if total is not None]
        divisor = sample_std(known) + self.config.std_eps
        return [
            [0.0 if total is None else total / divisor for total in totals] for totals in summed
        ]

    def _normalized(self, values: list[float]) -> list[float]:
        """(v_i - mean(v)) / (s(v) + std_eps); 0 if all are equal."""
        if all_equal(values):
            return [0.0] * len(values)
        return scaled(values, sample_std(values), self.config.std_eps)

    def _functions(self, episodes: list[Episode]) -> list[tuple[float, list[float | None]]]:
        """Each function's weight and its values for `episodes`; the last is the penalty."""
        names = sorted({name for episode in episodes for name in episode.scored.reward_breakdown})
        found: list[tuple[float, list[float | None]]] = []
        for name in names:
            weight = self.config.weights.get(name, 1.0)
            if weight != 0:
                found.append((weight, [e.scored.reward_breakdown.get(name) for e in episodes]))
        if not names:
            return [(1.0, [episode.credit.shaped_reward for episode in episodes])]
        return [*found, (1.0, [e.credit.shaped_reward - e.reward for e in episodes])]


class EntropyBonus(Grpo):
    """Grpo's advantages of r_i + b_i, b_i = coef s(r) (h_i - mean(h)) / max(s(h), 1e-6), h_i = -mean_t log mu. MaxEnt-GRPO's authors.

    s(r) is the standard deviation of the step's rewards, 1 if they are equal; mean(h) and s(h) are the group's. s with N.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Grpo.Config):
        coef: float = number(0.1, least=0)
        """Weight of the bonus, in standard deviations of the step's rewards."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            value, remedy = objective.credit, "The bonus is of whole completions. Leave it out."
            expect(
                value == "episode", "algorithm.credit", value, "episode with EntropyBonus", remedy
            )

    def of_step(
        self, rewards: list[list[float | None]], groups: list[Group[Episode]]
    ) -> list[list[float]]:
        known = [reward for of_group in rewards for reward in of_group if reward is not None]
        size = self.config.coef * (1.0 if all_equal(known) else float(np.std(known)))
        totals = [list(of_group) for of_group in rewards]
        for total, group in zip(totals, groups, strict=True):
            places = [i for i, reward in enumerate(total) if reward is not None]
            done = [group.samples[i].completion for i in places]
            entropies = [
                -math.fsum(c.sampled_logprobs.tolist()) / max(c.num_sampled, 1) for c in done
            ] or [0.0]
            bonuses = (
                size * (np.array(entropies) - np.mean(entropies)) / max(np.std(entropies), 1e-6)
            )  # [G]
            for i, bonus in zip(places, bonuses.tolist()):
                group.samples[i].credit.columns["entropy_bonus"] = bonus
                total[i] += bonus
        return super().of_step(totals, groups)


class Gspo(Clip):
    """The clip loss with the sequence ratio s_i = exp(mean_t (log pi - log pi_old)). GSPO, arXiv 2507.18071.

    The gradient of s_i flows through every token of the sequence. The paper combines it with `SeqMeanTokenMean` and a
    much narrower clip range than a token ratio needs.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        eps_low: float = number(3e-4, above=0, most=1)
        """Sequence ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(4e-4, above=0, most=math.inf)
        """Sequence ratios above 1 + eps_high get no gradient where A > 0."""

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        """[S] log s_i."""
        return inputs.sequences.mean(inputs.log_ratio)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(self.of_sequence(inputs))  # [T]

    def ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(safe_exp(self.of_sequence(inputs)))  # [T]


class Gmpo(TokenLoss):
    """l_t = -exp(mean_t b_t) A, b_t = log rho_t held below eps_high where A > 0 and above -eps_low where A < 0.

    The geometric mean of clipped token ratios. The paper combines it with `SeqMeanTokenMean`. GMPO, arXiv 2507.20673.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        eps_low: float = number(0.4, above=0, most=math.inf)
        """Where A < 0, a log ratio below -eps_low gets no gradient."""
        eps_high: float = number(0.4, above=0, most=math.inf)
        """Where A > 0, a log ratio above eps_high gets no gradient."""

    def ratio(self, inputs: LossInputs) -> Tensor:
        log_ratio = inputs.log_ratio  # [T]
        lowered = log_ratio.clamp(max=self.config.eps_high)  # [T]
        raised = log_ratio.clamp(min=-self.config.eps_low)  # [T]
        bounded = torch.where(inputs.advantages > 0, lowered, raised)  # [T]
        return inputs.sequences.expand(safe_exp(inputs.sequences.mean(bounded)))  # [T]

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -self.ratio(inputs) * inputs.advantages  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low" and "high", of the token's own ratio."""
        return {
            "low": (inputs.log_ratio < -self.config.eps_low) & (inputs.advantages < 0),  # [T]
            "high": (inputs.log_ratio > self.config.eps_high) & (inputs.advantages > 0),  # [T]
        }


class Cispo(TokenLoss):
    """l_t = -stopgrad(clamp(rho, floor, cap)) A log pi. CISPO, arXiv 2506.13585.

    Only the weight is clipped, so every token keeps its gradient. Both bounds are absolute, not 1 +- eps.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        cap: float = number(5.0, above=0, most=math.inf)
        """Largest importance weight (absolute)."""
        floor: float | None = number(None, least=0, most="cap")
        """Smallest importance weight (absolute); None for no bound, as in the paper's experiments."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight = (
            self.ratio(inputs).detach().clamp(min=self.config.floor, max=self.config.cap)
        )  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low" and "high", where the weight is at its bound. The gradient remains."""
        return {
            "low": ratio < (self.config.floor or 0.0),
            "high": ratio > self.config.cap,
        }  # [T] each


class Dppo(Cispo):
    """l_t = -m_t stopgrad(min(rho, cap)) A log pi. m_t is 0 where A > 0 and pi - pi_old > delta_high, or A < 0 and
    pi - pi_old < -delta_low, else 1.

    The bound is on the probability itself, not on its ratio: a rare token may change by a large factor. pi_old is the sampler
    with `algorithm.old_logprobs` "sampler", as in the paper. DPPO with binary total variation, arXiv 2602.04879 eq. 13.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(Cispo.Config):
        cap: float = number(20.0, above=0, most=math.inf)
        """Largest importance weight (absolute)."""
        delta_low: float = number(0.2, above=0, most=1)
        """A token whose probability has fallen by more gets no gradient where A < 0."""
        delta_high: float = number(0.2, above=0, most=1)
        """A token whose probability has risen by more gets no gradient where A > 0."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        dropped = self.clipped(inputs, inputs.mask)  # [T] each
        return torch.where(dropped["low"] | dropped["high"], 0.0, super().__call__(inputs))  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low" and "high", where the token is dropped."""
        change = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()  # [T]
        return {
            "low": (change < -self.config.delta_low) & (inputs.advantages < 0),  # [T]
            "high": (change > self.config.delta_high) & (inputs.advantages > 0),  # [T]
        }


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """[T] `positive` where A >= 0, else `negative`, in the dtype of the advantages."""
    return torch.where(advantages >= 0, torch.full_like(advantages, positive), negative)


class Sapo(TokenLoss):
    """l_t = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos where A > 0, else tau_neg. SAPO, arXiv 2511.20347.

    A soft clip: the gradient falls as rho leaves 1, and faster where A < 0. The paper combines it with `SeqMeanTokenMean`.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        tau_pos: float = number(1.0, above=0)
        """Temperature where A > 0."""
        tau_neg: float = number(1.05, above=0)
        """Temperature where A < 0."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        tau = by_sign(inputs.advantages, self.config.tau_pos, self.config.tau_neg)  # [T]
        gate = 4 / tau * torch.sigmoid(tau * (self.ratio(inputs) - 1))  # [T]
        return -gate * inputs.advantages  # [T]


class Vespo(TokenLoss):
    """l_t = -stopgrad(w^k e^(lambda (1 - w))) A log pi, w = prod_t rho_t of the whole sequence. VESPO, arXiv 2602.10693.

    k and lambda depend on the sign of A. With `algorithm.old_logprobs` "sampler", w is pi / mu, as in the paper.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        k_pos: float = number(2.0, least=0)
        """k where A >= 0: how much a sequence that has become less likely counts less."""
        lambda_pos: float = number(3.0, above=0)
        """lambda where A >= 0: how much a sequence that has become more likely counts less."""
        k_neg: float = number(3.0, least=0)
        """k where A < 0."""
        lambda_neg: float = number(2.0, above=0)
        """lambda where A < 0."""

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        clamped = inputs.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # [T]
        return inputs.sequences.expand(inputs.sequences.sum(clamped))  # [T]

    def __call__(self, inputs: LossInputs) -> Tensor:
        least = math.log(1e-8)  # of log w, as in the authors' code
        log_w = self.log_ratio(inputs).detach().clamp(least, LOG_RATIO_LIMIT)  # [T]
        k = by_sign(inputs.advantages, self.config.k_pos, self.config.k_neg)  # [T]
        decay = by_sign(inputs.advantages, self.config.lambda_pos, self.config.lambda_neg)  # [T]
        weight = (k * log_w + decay * (1 - log_w.exp())).exp()  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]


class Reinforce(TokenLoss):
    """l_t = -A log pi: no ratio, no clipping. Williams 1992."""

    zero_without_advantage = True
    uses_ratio = False

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs  # [T]


class SeqMeanTokenMean(Aggregation):
    """L = (1 / S) sum_i (1 / T_i) sum_t l_it, over the S sequences of the optimizer step. GRPO, arXiv
    2402.03300."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        means = inputs.sequences.mean(token_losses)  # [S]
        return means.sum() / max(inputs.normalizers.num_sequences, 1)


class SeqSumConst(Aggregation):
    """L = sum_i sum_t l_it / (S * longest completion allowed). Dr.GRPO, arXiv 2503.20783.

    The divisor does not depend on the sampled lengths, so a completion's weight grows linearly with its length.
    """

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        sequences = max(inputs.normalizers.num_sequences, 1)
        return (token_losses * inputs.mask).sum() / (
            sequences * inputs.normalizers.max_completion_tokens
        )


class TokenTruncate(Mismatch):
    """min(w_t, cap): truncated importance sampling (TIS)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        cap: float = number(2.0, above=0, most=math.inf)
        """The largest weight."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        truncated = weight.clamp(max=self.config.cap)  # [T]
        return Correction(truncated, weight > self.config.cap)


class SequenceTruncate(TokenTruncate):
    """min(w_i, cap), w_i the geometric mean of the sequence's token weights.

    The geometric mean does not depend on the length. A product of weights would vanish or explode in long completions.
    """

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        return super().__call__(sequences.expand(sequences.mean(log_weight)), sequences)  # [T]


class TokenMask(Mismatch):
    """w_t inside [low, high], else 0: IcePop."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        low: float = number(0.5, least=0)
        """The smallest weight that is kept."""
        high: float = number(5.0, above="low", most=math.inf)
        """The largest weight that is kept."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        outside = (weight < self.config.low) | (weight > self.config.high)  # [T]
        return Correction(torch.where(outside, 0.0, weight), outside)  # [T], [T]


class SequenceMask(TokenMask):
    """w_i inside [low, high], else 0, w_i the geometric mean of the sequence's token weights."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        return super().__call__(sequences.expand(sequences.mean(log_weight)), sequences)  # [T]
