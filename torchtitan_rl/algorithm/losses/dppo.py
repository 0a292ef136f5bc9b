"""DPPO: a trust region of probabilities."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, safe_exp
from torchtitan_rl.fields.number import number


class Dppo(TokenLoss):
    """l_t = -m_t stopgrad(min(rho, cap)) A log pi. m_t is 0 where A > 0 and pi - pi_old > delta_high, or A < 0 and
    pi - pi_old < -delta_low, else 1.

    The bound is on the probability itself, not on its ratio: a rare token may change by a large factor. pi_old is the sampler
    with `algorithm.old_logprobs` "sampler", as in the paper. DPPO with binary total variation, arXiv 2602.04879 eq. 13.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        cap: float = number(20.0, above=0, most=math.inf)
        """Largest importance weight (absolute)."""
        delta_low: float = number(0.2, above=0, most=1)
        """A token whose probability has fallen by more gets no gradient where A < 0."""
        delta_high: float = number(0.2, above=0, most=1)
        """A token whose probability has risen by more gets no gradient where A > 0."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        change = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()  # [T]
        low = (change < -self.config.delta_low) & (inputs.advantages < 0)  # [T]
        high = (change > self.config.delta_high) & (inputs.advantages > 0)  # [T]
        ratio = safe_exp(inputs.log_ratio.detach())  # [T]
        inputs.report_ratio(ratio, low=low, high=high)
        weight = ratio.clamp(max=self.config.cap)  # [T]
        losses = -weight * inputs.advantages * inputs.logprobs  # [T]
        return torch.where(low | high, 0.0, losses)  # [T]
