"""The protocol of a sampler-mismatch correction.

The sampler (vLLM) and the trainer run different kernels, so the tokens come from mu, not from pi_old. A correction is
a stop-gradient weight made from w = pi_old / mu that multiplies the loss of each token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from torchtitan.config import Configurable

from ..inputs import Sequences


class Correction(NamedTuple):
    """What a correction does to each token."""

    weight: Tensor
    """[T] multiplies the token's loss; no gradient."""
    changed: Tensor
    """[T] bool, where the importance weight was truncated or masked."""


class Mismatch(Configurable, ABC):
    """Turns log w = log pi_old - log mu into the weight of each token."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    corrects: ClassVar[bool] = True
    """False for the correction that leaves every weight at 1."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, log_weight: Tensor, sequences: Sequences) -> Correction:
        """`log_weight` [T], without gradient, 0 outside the loss mask."""
