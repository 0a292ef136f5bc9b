"""Kimi K2.5's penalty on the log ratio."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.losses.modifier import Modifier
from torchtitan_rl.fields.number import number


class SquaredLogRatio(Modifier):
    """l_t + coef (log pi - log pi_old)^2 on every token in the loss. Kimi K2.5, arXiv 2602.02276.

    With `algorithm.old_logprobs` "sampler" pi_old is the sampler, as in prime-rl, whose coef is 1e-3.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        coef: float = number(1e-3, above=0)
        """Weight of the square, in the loss per squared nat."""

    needs_loss_of = ("advantages", "rewards", "samples")

    def __call__(self, inputs: LossInputs) -> Tensor:
        return super().__call__(inputs) + self.config.coef * inputs.log_ratio.square()  # [T]
