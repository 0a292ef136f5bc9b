"""Every sequence weighs the same."""

from dataclasses import dataclass

from torch import Tensor

from ..inputs import LossInputs
from .base import Aggregation


class SeqMeanTokenMean(Aggregation):
    """L = (1 / S) sum_i (1 / T_i) sum_t l_it, over the update's S sequences. GRPO, arXiv 2402.03300."""

    @dataclass(kw_only=True, slots=True)
    class Config(Aggregation.Config):
        """No fields."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        of_sequence = inputs.sequences.mean(token_losses)  # [S]
        return of_sequence.sum() / max(inputs.normalizers.num_sequences, 1)
