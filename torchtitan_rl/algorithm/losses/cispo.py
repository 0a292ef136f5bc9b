"""Clipped importance-sampling policy optimization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.run.errors import expect
from ..inputs import LossInputs
from .base import PolicyLoss


class Cispo(PolicyLoss):
    """l_t = -stopgrad(min(rho, cap)) A log pi. CISPO, arXiv 2506.13585.

    The weight is clipped, not the gradient: every token keeps one. `cap` is absolute, not 1 + eps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        cap: float = 5.0
        """Largest importance weight (absolute)."""

        def __post_init__(self) -> None:
            expect(
                self.cap > 0, "algorithm.loss.cap", self.cap, "a number > 0", "Use 5; for a bound 1 + eps give 1 + eps."
            )

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight = self.ratio(inputs).detach().clamp(max=self.config.cap)  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(ratio, dtype=torch.bool), ratio > self.config.cap  # [T], [T]
