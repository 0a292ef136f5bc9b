"""Corrections for the difference between the sampler and the trainer."""

from .base import Correction, Mismatch
from .mask import SequenceMask, TokenMask
from .none import NoCorrection
from .truncate import SequenceTruncate, TokenTruncate

__all__ = [
    "Correction",
    "Mismatch",
    "NoCorrection",
    "SequenceMask",
    "SequenceTruncate",
    "TokenMask",
    "TokenTruncate",
]
