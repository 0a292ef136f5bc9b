"""CISPO: clipped importance weights that keep every token's gradient."""

import math
from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, safe_exp
from torchtitan_rl.fields.number import number


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
        ratio = safe_exp(inputs.log_ratio.detach())  # [T]
        weight = ratio.clamp(min=self.config.floor, max=self.config.cap)  # [T]
        # Both sides are where the weight is at its bound. The gradient remains.
        low, high = ratio < (self.config.floor or 0.0), ratio > self.config.cap  # [T] each
        inputs.report_ratio(ratio, low=low, high=high)
        return -weight * inputs.advantages * inputs.logprobs  # [T]
