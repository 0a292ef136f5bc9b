"""VESPO: a smooth weight of the sequence's ratio."""

import math
from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import (
    LOG_RATIO_LIMIT,
    LossInputs,
    by_sign,
    safe_exp,
)
from torchtitan_rl.fields.number import number


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

    def __call__(self, inputs: LossInputs) -> Tensor:
        clamped = inputs.log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # [T]
        log_ratio = inputs.sequences.expand(inputs.sequences.sum(clamped))  # [T]
        inputs.report_ratio(safe_exp(log_ratio), log_ratio)
        least = math.log(1e-8)  # of log w, as in the authors' code
        log_w = log_ratio.clamp(least, LOG_RATIO_LIMIT)  # [T]
        k = by_sign(inputs.advantages, self.config.k_pos, self.config.k_neg)  # [T]
        decay = by_sign(inputs.advantages, self.config.lambda_pos, self.config.lambda_neg)  # [T]
        weight = (k * log_w + decay * (1 - log_w.exp())).exp()  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]
