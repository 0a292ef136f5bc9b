"""PPO's clip loss, which GRPO and DAPO use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, safe_exp
from torchtitan_rl.fields.number import number


class Clip(TokenLoss):
    """l_t = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with dual_clip c, for A < 0, min(l_t, -c A).

    PPO arXiv 1707.06347, GRPO arXiv 2402.03300, DAPO (eps_high 0.28) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        eps_low: float = number(0.2, above=0, most=1)
        """Ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(0.2, above=0, most=10, remedy="Use 0.28, DAPO's value.")
        """Ratios above 1 + eps_high get no gradient where A > 0; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = number(None, above=1, remedy="Use 3, the paper's value.")
        """Bound on the loss where A < 0, as a multiple of |A|; None for no bound."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        return self.clip(inputs, safe_exp(inputs.log_ratio), inputs.log_ratio)  # [T]

    def clip(self, inputs: LossInputs, ratio: Tensor, log_ratio: Tensor) -> Tensor:
        """[T] the loss with this ratio [T], whose logarithm before clamping is `log_ratio` [T]."""
        advantages = inputs.advantages  # [T]
        negative = advantages < 0  # [T]
        least, most = 1 - self.config.eps_low, 1 + self.config.eps_high
        clipped = {"low": (ratio < least) & negative, "high": (ratio > most) & (advantages > 0)}
        losses = -torch.minimum(ratio * advantages, ratio.clamp(least, most) * advantages)  # [T]
        if self.config.dual_clip is not None:
            clipped["dual"] = (ratio > self.config.dual_clip) & negative  # [T]
            ceiling = torch.minimum(losses, -self.config.dual_clip * advantages)  # [T]
            losses = torch.where(negative, ceiling, losses)  # [T]
        inputs.report_ratio(ratio, log_ratio, **clipped)
        return losses

    def clip_sequences(self, inputs: LossInputs, log_ratio: Tensor) -> Tensor:
        """[T] the loss with the sequences' ratios, whose logarithm is `log_ratio` [S]."""
        expand = inputs.sequences.expand
        return self.clip(inputs, expand(safe_exp(log_ratio)), expand(log_ratio))  # [T]
