"""Beyond the 80/20 rule: a loss of the tokens with the highest entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.losses.modifier import Modifier
from torchtitan_rl.fields.number import number


class TopEntropy(Modifier):
    """Loss 0 but for the tokens of the highest entropy, a fifth by default. Beyond the 80/20 rule, arXiv 2506.01939.

    The threshold is that of all tokens of the micro-batch, also without an advantage, so all of them are in the batch; the paper's is that of the batch. The other tokens
    count in the mean.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        fraction: float = number(0.2, above=0, most=1)
        """Share of the tokens that are trained on."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        entropy = inputs.entropy.detach()  # [T]
        inside = torch.where(inputs.mask > 0, entropy, torch.nan)  # [T]
        chosen = entropy >= inside.nanquantile(1 - self.config.fraction)  # [T]
        losses = super().__call__(inputs)  # [T]
        inputs.log_metric("top_entropy/mean", entropy, chosen)
        return torch.where(chosen, losses, 0.0)  # [T]
