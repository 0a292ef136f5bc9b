"""Aggregations: per-token losses into the scalar that is minimised."""

from abc import ABC, abstractmethod

from torch import Tensor

from torchtitan_rl.core.algorithm.inputs import LossInputs
from torchtitan_rl.core.config import OwnConfig


class Aggregation(OwnConfig, ABC):
    """Divides by counts of the whole update, so that the shares of micro-batches and data-parallel ranks add up."""

    @abstractmethod
    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """[T] -> 0-d. Tokens outside the mask count nothing; an update without loss tokens gives 0, not NaN."""


class TokenMean(Aggregation):
    """L = sum_t m_t l_t / N, N the loss tokens of the whole update. DAPO, arXiv 2503.14476."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return (token_losses * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)


class SeqMeanTokenMean(Aggregation):
    """L = (1 / S) sum_i (1 / T_i) sum_t l_it, over the update's S sequences. GRPO, arXiv 2402.03300."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        of_sequence = inputs.sequences.mean(token_losses)  # [S]
        return of_sequence.sum() / max(inputs.normalizers.num_sequences, 1)


class SeqSumConst(Aggregation):
    """L = sum_i sum_t l_it / (S * longest completion allowed). Dr.GRPO, arXiv 2503.20783.

    Linear in each completion's length: nothing divides by the lengths that happened to be sampled.
    """

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        normalizers = inputs.normalizers
        constant = max(normalizers.num_sequences, 1) * normalizers.max_completion_tokens
        return (token_losses * inputs.mask).sum() / constant
