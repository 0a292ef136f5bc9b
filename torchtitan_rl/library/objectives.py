"""Advantages, losses and corrections that one picks by name beside the core's own: RLOO, GSPO, CISPO, REINFORCE, IcePop."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.core.algorithm.advantages import Advantage, Grpo, RewardedGroup, centered, sample_std, scaled
from torchtitan_rl.core.algorithm.losses import Clip, LossInputs, Sequences, TokenLoss, safe_exp
from torchtitan_rl.core.algorithm.mismatch import Correction, Mismatch, TokenTruncate
from torchtitan_rl.core.config import number
from torchtitan_rl.core.types import Episode


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


class Gspo(Clip):
    """The clip loss with the sequence ratio s_i = exp(mean_t (log pi - log pi_old)). GSPO, arXiv 2507.18071.

    The gradient of s_i flows through every token of the sequence. The paper combines it with `SeqMeanTokenMean` and a
    much narrower clip range than a token ratio needs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        eps_low: float = number(3e-4, above=0, most=1)
        """Sequence ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(4e-4, above=0, most=math.inf)
        """Sequence ratios above 1 + eps_high get no gradient where A > 0."""

    def zero_gradient(self, episode: Episode) -> bool:
        return type(self) is Gspo and not episode.credit.has_advantage

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        """[S] log s_i."""
        return inputs.sequences.mean(inputs.log_ratio)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(self.of_sequence(inputs))  # [T]

    def ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(safe_exp(self.of_sequence(inputs)))  # [T]


class Cispo(TokenLoss):
    """l_t = -stopgrad(clamp(rho, floor, cap)) A log pi. CISPO, arXiv 2506.13585.

    Only the weight is clipped, so every token keeps its gradient. Both bounds are absolute, not 1 +- eps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        cap: float = number(5.0, above=0, most=math.inf)
        """Largest importance weight (absolute)."""
        floor: float | None = number(None, least=0, most="cap")
        """Smallest importance weight (absolute); None for no bound, as in the paper's experiments."""

    def zero_gradient(self, episode: Episode) -> bool:
        return type(self) is Cispo and not episode.credit.has_advantage

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight = self.ratio(inputs).detach().clamp(min=self.config.floor, max=self.config.cap)  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low" and "high", where the weight is at its bound. The gradient remains."""
        return {"low": ratio < (self.config.floor or 0.0), "high": ratio > self.config.cap}  # [T] each


class Reinforce(TokenLoss):
    """l_t = -A log pi: no ratio, no clipping. Williams 1992."""

    uses_ratio = False

    def zero_gradient(self, episode: Episode) -> bool:
        return type(self) is Reinforce and not episode.credit.has_advantage

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs  # [T]


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
