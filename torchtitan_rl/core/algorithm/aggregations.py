"""Aggregations: per-token losses to the scalar that is minimised."""

from abc import ABC, abstractmethod

from torch import Tensor

from torchtitan_rl.core.algorithm.inputs import LossInputs
from torchtitan_rl.core.algorithm.returned import tensor_from
from torchtitan_rl.core.own_config import OwnConfig


class Aggregation(OwnConfig, ABC):
    """Divides by counts of the whole update, so that the shares of micro-batches and data-parallel ranks add up."""

    @abstractmethod
    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """[T] -> 0-d. Tokens outside the mask are ignored. An update without loss tokens gives 0, not NaN."""

    def share(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """0-d: `__call__`'s result. Raises UserError if it has another shape."""
        what = "0-d, this micro-batch's share of the loss. Sum over the tokens and divide by inputs.normalizers."
        return tensor_from(self, "algorithm.aggregation", self(token_losses, inputs), (), what)


class TokenMean(Aggregation):
    """L = sum_t m_t l_t / N, N the loss tokens of the whole update. DAPO, arXiv 2503.14476."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return (token_losses * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)


class SeqMeanTokenMean(Aggregation):
    """L = (1 / S) sum_i (1 / T_i) sum_t l_it, over the update's S sequences. GRPO, arXiv 2402.03300."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return inputs.sequences.mean(token_losses).sum() / max(inputs.normalizers.num_sequences, 1)  # sum of [S]


class SeqSumConst(Aggregation):
    """L = sum_i sum_t l_it / (S * longest completion allowed). Dr.GRPO, arXiv 2503.20783.

    The divisor does not depend on the sampled lengths, so a completion's weight grows linearly with its length.
    """

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        sequences = max(inputs.normalizers.num_sequences, 1)
        return (token_losses * inputs.mask).sum() / (sequences * inputs.normalizers.max_completion_tokens)
