"""Group sequence policy optimization."""

from dataclasses import dataclass

from torch import Tensor

from ..inputs import LossInputs, safe_exp
from .clip import Clip


class Gspo(Clip):
    """The clip loss with the sequence ratio s_i = exp(mean_t (log pi - log pi_old)). GSPO, arXiv 2507.18071.

    The gradient of s_i flows through every token of the sequence. The paper's objective is this with
    `SeqMeanTokenMean`; its clip range is far narrower than a token ratio's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        eps_low: float = 3e-4
        """Sequence ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = 4e-4
        """Sequence ratios above 1 + eps_high get no gradient where A > 0."""

    def ratio(self, inputs: LossInputs) -> Tensor:
        log_ratio = inputs.sequences.mean(inputs.log_ratio)  # [S]
        return inputs.sequences.expand(safe_exp(log_ratio))  # [T]
