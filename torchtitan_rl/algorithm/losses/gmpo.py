"""GMPO: the geometric mean of clipped token ratios."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, safe_exp
from torchtitan_rl.fields.number import number


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

    def __call__(self, inputs: LossInputs) -> Tensor:
        log_ratio, advantages = inputs.log_ratio, inputs.advantages  # [T] each
        lowered = log_ratio.clamp(max=self.config.eps_high)  # [T]
        raised = log_ratio.clamp(min=-self.config.eps_low)  # [T]
        bounded = torch.where(advantages > 0, lowered, raised)  # [T]
        ratio = inputs.sequences.expand(safe_exp(inputs.sequences.mean(bounded)))  # [T]
        inputs.report_ratio(
            ratio,
            low=(log_ratio < -self.config.eps_low) & (advantages < 0),
            high=(log_ratio > self.config.eps_high) & (advantages > 0),
        )
        return -ratio * advantages
