"""A sequence weighs by its length, against a constant."""

from dataclasses import dataclass

from torch import Tensor

from ..inputs import LossInputs
from .base import Aggregation


class SeqSumConst(Aggregation):
    """L = sum_i sum_t l_it / (S * longest completion allowed). Dr.GRPO, arXiv 2503.20783.

    Linear in each completion's length: nothing divides by the lengths that happened to be sampled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Aggregation.Config):
        """No fields."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        normalizers = inputs.normalizers
        constant = max(normalizers.num_sequences, 1) * normalizers.max_completion_tokens
        return (token_losses * inputs.mask).sum() / constant
