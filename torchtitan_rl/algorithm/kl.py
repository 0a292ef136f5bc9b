"""The divergence from the frozen reference: its estimators, and its place in the loss or the reward."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode

K3_LIMIT = 60.0
"""Clamp on |d| in k3: e^60 = 1.1e26 is a finite float32."""

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """An estimate of KL(pi || pi_ref) from samples of pi. Schulman, "Approximating KL divergence" (2020).

    With d = log pi - log pi_ref: k1 = d (unbiased, any sign); k2 = d^2 / 2 (biased, >= 0); k3 = e^(-d) + d - 1
    (unbiased, >= 0). All are exactly 0 at d = 0. k3 uses expm1, because e^(-d) - 1 loses all digits of a small d in
    float32.

    In k3, d is clamped to +-60 for the exponent and the linear term. Beyond the limit the value and the gradient 1 -
    e^(-d) stay constant: -1.1e26 below -60 and 1 above 60, towards the reference on both sides. A plain clamp would
    make the gradient 0. A clamp of the exponent alone would make it +1, which points away from the reference below
    -60.

    Args:
        log_ratio: d, of any shape; the result has the same shape.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    # The clamped value, with gradient 1 everywhere.
    value = log_ratio.detach()
    clamped = value.clamp(-K3_LIMIT, K3_LIMIT) + (log_ratio - value)
    return torch.expm1(-clamped) + clamped


class KL(OwnConfig):
    """The reference term coef * KL: in the loss (per token, then aggregated) or in the reward (per completion)."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        coef: float = number(0.0, least=0)
        """Weight of the term; with 0 no reference model is loaded."""
        estimator: Estimator = "k3"
        """The estimator of the divergence from sampled tokens. In the loss, the expected gradient of k1 is 0."""
        placement: Literal["loss", "reward"] = "loss"
        """Loss: coef * KL is added to each token's loss. Reward: coef * sum_t KL_t is subtracted from the reward."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_loss = config.coef > 0 and config.placement == "loss"
        self.in_reward = config.coef > 0 and config.placement == "reward"

    def __call__(self, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        """[T] the unweighted estimate of each token."""
        return kl_estimate(logprobs - reference_logprobs, self.config.estimator)  # [T]

    def penalty(self, episode: Episode) -> float:
        """coef * sum_t KL_t over the sampled tokens, with the sampler's log-probabilities as the policy's."""
        sampled = episode.completion.loss_mask  # [L]
        policy = torch.from_numpy(episode.completion.sampled_logprobs).double()  # [num_sampled]
        reference = torch.from_numpy(episode.reference_logprobs[sampled]).double()  # [num_sampled]
        return self.config.coef * self(policy, reference).sum().item()
