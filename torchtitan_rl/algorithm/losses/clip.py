"""The clipped surrogate of PPO, GRPO and DAPO."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.run.errors import expect
from ..inputs import LossInputs
from .base import PolicyLoss


class Clip(PolicyLoss):
    """l_t = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with dual_clip c, for A < 0, min(l_t, -c A).

    PPO arXiv 1707.06347, GRPO arXiv 2402.03300, DAPO (eps_high 0.28) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        eps_low: float = 0.2
        """Ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = 0.2
        """Ratios above 1 + eps_high get no gradient where A > 0; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = None
        """Bound on the loss where A < 0, as a multiple of |A|; None for no bound."""

        def __post_init__(self) -> None:
            expect(0 < self.eps_low <= 1, "algorithm.loss.eps_low", self.eps_low, "a number in (0, 1]", "Use 0.2.")
            expect(
                self.eps_high > 0, "algorithm.loss.eps_high", self.eps_high, "a number > 0", "Use 0.2, or 0.28 (DAPO)."
            )
            expect(
                self.dual_clip is None or self.dual_clip > 1,
                "algorithm.loss.dual_clip", self.dual_clip, "None or a number > 1", "Use 3, the paper's value.",
            )  # fmt: skip

    def __call__(self, inputs: LossInputs) -> Tensor:
        advantages = inputs.advantages  # [T]
        ratio = self.ratio(inputs)  # [T]
        bounded = ratio.clamp(1 - self.config.eps_low, 1 + self.config.eps_high)  # [T]
        losses = -torch.minimum(ratio * advantages, bounded * advantages)  # [T]
        if self.config.dual_clip is None:
            return losses
        ceiling = torch.minimum(losses, -self.config.dual_clip * advantages)  # [T]
        return torch.where(advantages < 0, ceiling, losses)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor] | None:
        low = (ratio < 1 - self.config.eps_low) & (inputs.advantages < 0)  # [T]
        high = (ratio > 1 + self.config.eps_high) & (inputs.advantages > 0)  # [T]
        return low, high
