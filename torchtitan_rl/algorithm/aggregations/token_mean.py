"""Every token weighs the same."""

from dataclasses import dataclass

from torch import Tensor

from ..inputs import LossInputs
from .base import Aggregation


class TokenMean(Aggregation):
    """L = sum_t m_t l_t / N, N the loss tokens of the whole update. DAPO, arXiv 2503.14476."""

    @dataclass(kw_only=True, slots=True)
    class Config(Aggregation.Config):
        """No fields."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return (token_losses * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)
