"""Truncated importance sampling, by token and by sequence."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.run.errors import expect
from ..inputs import Sequences, safe_exp
from .base import Correction, Mismatch


class TokenTruncate(Mismatch):
    """min(w_t, cap): truncated importance sampling (TIS)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        cap: float = 2.0
        """Largest weight."""

        def __post_init__(self) -> None:
            expect(self.cap > 0, "algorithm.mismatch.cap", self.cap, "a number > 0", "Use 2.")

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        return Correction(weight.clamp(max=self.config.cap), weight > self.config.cap)  # [T], [T]


class SequenceTruncate(TokenTruncate):
    """min(w_i, cap), w_i the geometric mean of the sequence's token weights.

    The product over the sequence would make long completions vanish or explode; the geometric mean does not depend on
    the length.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenTruncate.Config):
        """The fields of `TokenTruncate.Config`."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        of_sequence = sequences.expand(sequences.mean(log_weight))  # [T]
        return TokenTruncate.__call__(self, of_sequence, sequences)
