"""Masked importance sampling, by token (IcePop) and by sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_rl.run.errors import expect
from ..inputs import Sequences, safe_exp
from .base import Correction, Mismatch


class TokenMask(Mismatch):
    """w_t inside [low, high], else 0: IcePop."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        low: float = 0.5
        """Smallest weight that is kept."""
        high: float = 5.0
        """Largest weight that is kept."""

        def __post_init__(self) -> None:
            expect(self.low >= 0, "algorithm.mismatch.low", self.low, "a number >= 0", "Use 0.5.")
            expect(self.high > self.low, "algorithm.mismatch.high", self.high, f"a number > low ({self.low})", "Use 5.")

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        outside = (weight < self.config.low) | (weight > self.config.high)  # [T]
        return Correction(torch.where(outside, 0.0, weight), outside)  # [T], [T]


class SequenceMask(TokenMask):
    """w_i inside [low, high], else 0, w_i the geometric mean of the sequence's token weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenMask.Config):
        """The fields of `TokenMask.Config`."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        of_sequence = sequences.expand(sequences.mean(log_weight))  # [T]
        return TokenMask.__call__(self, of_sequence, sequences)
