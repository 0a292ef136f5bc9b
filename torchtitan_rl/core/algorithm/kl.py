"""The divergence from the frozen reference: estimators, and where the term goes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan_rl.core.config import OwnConfig, number
from torchtitan_rl.core.types import Episode

K3_LIMIT = 60.0
"""k3's d is clamped to +-this: e^60 = 1.1e26 is a finite float32."""

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """An estimate of KL(pi || pi_ref) from samples of pi. Schulman, "Approximating KL divergence" (2020).

    With d = log pi - log pi_ref: k1 = d (unbiased, any sign); k2 = d^2 / 2 (biased, >= 0); k3 = e^(-d) + d - 1
    (unbiased, >= 0). All are exactly 0 at d = 0. k3 uses expm1, for e^(-d) - 1 loses every digit of a small d in
    float32.

    k3's d is clamped once, for the exponent and the linear term, to +-60. Beyond the limit the value stays what it is
    there and so does the gradient, 1 - e^(-d): -1.1e26 below -60 and 1 above 60, towards the reference on both sides. A
    plain clamp would leave it at 0, one of the exponent alone at +1, which below -60 points away from the reference.

    Args:
        log_ratio: d, any shape; the result has the same.
        estimator: which one.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    clamped = log_ratio.detach().clamp(-K3_LIMIT, K3_LIMIT) + (log_ratio - log_ratio.detach())  # gradient 1 everywhere
    return torch.expm1(-clamped) + clamped


class KL(OwnConfig):
    """The reference term: coef * KL, in the loss (each token, then the aggregation) or the reward (each completion)."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        coef: float = number(0.0, least=0)
        """Weight of the term; 0 loads no reference model."""
        estimator: Estimator = "k3"
        """How the divergence is estimated from sampled tokens."""
        placement: Literal["loss", "reward"] = "loss"
        """In the loss, coef * KL is added to each token's; in the reward, coef * sum_t KL_t is subtracted from it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_loss = config.coef > 0 and config.placement == "loss"
        self.in_reward = config.coef > 0 and config.placement == "reward"

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """The unweighted estimate of each token, [T]."""
        return kl_estimate(logprobs - reference_logprobs, self.config.estimator)  # [T]

    def penalty(self, episode: Episode) -> float:
        """coef * sum_t KL_t over the tokens that the policy sampled, whose log-probabilities are the sampler's."""
        sampled = episode.completion.loss_mask  # [L]
        of_policy = torch.from_numpy(episode.completion.logprobs[sampled]).double()  # [num_sampled]
        of_reference = torch.from_numpy(episode.reference_logprobs[sampled]).double()  # [num_sampled]
        return self.config.coef * kl_estimate(of_policy - of_reference, self.config.estimator).sum().item()
