"""SAPO: a soft clip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, by_sign, safe_exp
from torchtitan_rl.fields.number import number


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
        ratio = safe_exp(inputs.log_ratio)  # [T]
        inputs.report_ratio(ratio)
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))  # [T]
        return -gate * inputs.advantages  # [T]
