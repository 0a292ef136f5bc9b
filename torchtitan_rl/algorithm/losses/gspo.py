"""GSPO: the clip loss with the ratio of a whole sequence."""

import math
from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.fields.number import number


class Gspo(Clip):
    """The clip loss with the sequence ratio s_i = exp(mean_t (log pi - log pi_old)). GSPO, arXiv 2507.18071.

    The gradient of s_i flows through every token of the sequence. The paper combines it with `SeqMeanTokenMean` and a
    much narrower clip range than a token ratio needs.
    """

    zero_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        eps_low: float = number(3e-4, above=0, most=1)
        """Sequence ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(4e-4, above=0, most=math.inf)
        """Sequence ratios above 1 + eps_high get no gradient where A > 0."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        return self.clip_sequences(inputs, inputs.sequences.mean(inputs.log_ratio))  # [T]
