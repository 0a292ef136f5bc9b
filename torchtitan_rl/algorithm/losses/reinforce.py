"""REINFORCE."""

from dataclasses import dataclass

from torch import Tensor

from ..inputs import LossInputs
from .base import PolicyLoss


class Reinforce(PolicyLoss):
    """l_t = -A log pi: no ratio, no clipping. Williams 1992."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        """No fields."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs  # [T]
