"""No correction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..inputs import Sequences
from .base import Correction, Mismatch


class NoCorrection(Mismatch):
    """Weight 1 on every token."""

    @dataclass(kw_only=True, slots=True)
    class Config(Mismatch.Config):
        """No fields."""

    corrects = False

    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        return Correction(torch.ones_like(log_weight), torch.zeros_like(log_weight, dtype=torch.bool))  # [T], [T]
