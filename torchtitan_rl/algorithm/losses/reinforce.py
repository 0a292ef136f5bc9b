"""REINFORCE."""

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs


class Reinforce(TokenLoss):
    """l_t = -A log pi: no ratio, no clipping. Williams 1992."""

    zero_without_advantage = True

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs  # [T]
