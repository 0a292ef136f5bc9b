"""Corrections for the difference between the sampler and the trainer.

The sampler (vLLM) and the trainer run different kernels, so tokens are sampled from mu instead of pi_old. A correction
multiplies each token's loss by a weight made from w = pi_old / mu, without gradient.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss_inputs import Sequences, safe_exp
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig


class Correction(NamedTuple):
    """The weight of each token."""

    weight: Tensor
    """[T] factor on the token's loss, without gradient."""
    changed: Tensor
    """[T] bool, true where the importance weight was truncated or masked."""


class Mismatch(OwnConfig, ABC):
    """Turns log w = log pi_old - log mu into the weight of each token."""

    @abstractmethod
    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        """The correction for `log_weight` [T], which has no gradient and is 0 outside the loss mask."""


class NoCorrection(Mismatch):
    """Weight 1 on every token."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        changed = torch.zeros_like(log_weight, dtype=torch.bool)  # [T]
        return Correction(torch.ones_like(log_weight), changed)


class TokenTruncate(Mismatch):
    """min(w_t, cap): truncated importance sampling (TIS)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        cap: float = number(2.0, above=0, most=math.inf)
        """The largest weight."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        truncated = weight.clamp(max=self.config.cap)  # [T]
        return Correction(truncated, weight > self.config.cap)


class SequenceTruncate(TokenTruncate):
    """min(w_i, cap), w_i the geometric mean of the sequence's token weights.

    The geometric mean does not depend on the length. A product of weights would vanish or explode in long completions.
    """

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        return super().__call__(sequences.expand(sequences.mean(log_weight)), sequences)  # [T]


class TokenMask(Mismatch):
    """w_t inside [low, high], else 0: IcePop."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        low: float = number(0.5, least=0)
        """The smallest weight that is kept."""
        high: float = number(5.0, above="low", most=math.inf)
        """The largest weight that is kept."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        weight = safe_exp(log_weight)  # [T]
        outside = (weight < self.config.low) | (weight > self.config.high)  # [T]
        return Correction(torch.where(outside, 0.0, weight), outside)  # [T], [T]


class SequenceMask(TokenMask):
    """w_i inside [low, high], else 0, w_i the geometric mean of the sequence's token weights."""

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        return super().__call__(sequences.expand(sequences.mean(log_weight)), sequences)  # [T]
