"""The protocol of an aggregation: per-token losses in, this micro-batch's share of the step's loss out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import Configurable

from ..inputs import LossInputs


class Aggregation(Configurable, ABC):
    """Divides by counts of the whole update, so that the shares of micro-batches and data-parallel ranks add up."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """[T] -> 0-d. Tokens outside the mask count nothing; an update without loss tokens gives 0, not NaN."""
