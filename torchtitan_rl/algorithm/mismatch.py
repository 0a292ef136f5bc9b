"""Corrections for the difference between the sampler and the trainer.

The sampler (vLLM) and the trainer run different kernels, so tokens are sampled from mu instead of pi_old. A correction
multiplies each token's loss by a weight made from w = pi_old / mu, without gradient.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import Sequences
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
