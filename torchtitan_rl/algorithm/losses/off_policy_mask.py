"""DeepSeek-V3.2's mask of sequences that the policy has moved away from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.losses.modifier import Modifier
from torchtitan_rl.fields.number import number


class OffPolicyMask(Modifier):
    """Loss 0 where A < 0 in a sequence with mean_t (log mu - log pi) > delta. DeepSeek-V3.2, arXiv 2512.02556 eq. 9.

    mu is the sampler, so the mean covers both older weights and another arithmetic. Masked tokens count in the mean.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        delta: float = number(0.5, above=0)
        """The largest mean that is kept, in nats per token. The paper gives no value; this is TRL's example."""

    needs_loss_of = ("advantages", "rewards")
    zero_without_advantage = True

    def masked(self, inputs: LossInputs) -> Tensor:
        """[T] bool, true where the loss is 0."""
        log_ratio = inputs.sampler_logprobs - inputs.logprobs.detach()  # [T]
        far = inputs.sequences.mean(log_ratio) > self.config.delta  # [S]
        far = inputs.sequences.expand(far.to(inputs.mask.dtype)) > 0  # [T]
        return (inputs.advantages < 0) & far  # [T]

    def __call__(self, inputs: LossInputs) -> Tensor:
        losses = super().__call__(inputs)  # [T]
        masked = self.masked(inputs)  # [T]
        inputs.log_metric("off_policy/masked_fraction", masked.to(inputs.mask.dtype))
        return torch.where(masked, 0.0, losses)  # [T]
