"""How the losses of tokens become one number."""

from abc import ABC, abstractmethod

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.fields.own_config import OwnConfig


class Aggregation(OwnConfig, ABC):
    """Makes one number of token losses. It divides by counts of the whole optimizer step, so that the shares of micro-batches
    and data-parallel ranks add up."""

    @abstractmethod
    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """[T] -> 0-d. Tokens outside the mask are ignored. Without loss tokens it is 0, not NaN."""


class TokenMean(Aggregation):
    """L = sum_t m_t l_t / N, N the loss tokens of the whole optimizer step. DAPO, arXiv 2503.14476."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return (token_losses * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)


class SeqMeanTokenMean(Aggregation):
    """L = (1 / S) sum_i (1 / T_i) sum_t l_it, over the S sequences of the optimizer step. GRPO, arXiv
    2402.03300."""

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        means = inputs.sequences.mean(token_losses)  # [S]
        return means.sum() / max(inputs.normalizers.num_sequences, 1)


class SeqSumConst(Aggregation):
    """L = sum_i sum_t l_it / (S * longest completion allowed). Dr.GRPO, arXiv 2503.20783.

    The divisor does not depend on the sampled lengths, so a completion's weight grows linearly with its length.
    """

    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        sequences = max(inputs.normalizers.num_sequences, 1)
        divisor = sequences * inputs.normalizers.max_completion_tokens
        return (token_losses * inputs.mask).sum() / divisor
