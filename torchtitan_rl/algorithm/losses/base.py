"""The protocol of a policy loss."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.types import Episode, Metric

from ..aggregations import Aggregation
from ..inputs import LossInputs, safe_exp
from ..metrics.tally import Tally

if TYPE_CHECKING:
    from ..algorithm import Algorithm


class PolicyLoss(Configurable, ABC):
    """A loss to be minimised. Most write only `__call__`; the other methods have defaults that fit per-token losses."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

        def check_with(self, algorithm: "Algorithm.Config") -> None:
            """Raise ValueError where this loss cannot be combined with the rest of the configuration."""

    requires_whole_groups: ClassVar[bool] = False
    """Whether a prompt's sequences must lie in one micro-batch."""
    sets_advantages: ClassVar[bool] = False
    """Whether `weigh` fills in advantages and weights, in place of `algorithm.advantage`."""
    controller_inputs: tuple[str, ...] = ()
    """Keys of the step's merged metrics that `after_update` reads."""
    needs_reference: bool = False
    """Whether the frozen reference's log-probabilities must be on the episodes."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """The loss of each token, [T]; values outside `inputs.mask` are ignored."""

    def total(self, inputs: LossInputs, aggregation: Aggregation) -> Tensor:
        """0-d: this micro-batch's share of the step's loss, with the sampler-mismatch weight applied."""
        return aggregation(self(inputs) * inputs.correction, inputs)

    def ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the ratio the loss uses, with gradient; by default rho_t = exp(log pi - log pi_old)."""
        return safe_exp(inputs.log_ratio)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor] | None:
        """Two [T] bool tensors, (low, high): where clipping removes the gradient. None for a loss that never clips."""
        return None

    def weigh(self, group: list[Episode]) -> None:
        """Set `weight` and `advantage` on one group's episodes; only called where `sets_advantages`."""

    def episode_metrics(self, groups: list[list[Episode]]) -> dict[str, Metric]:
        """Metrics of the step's groups that only this loss knows."""
        return {}

    def record(self, tally: Tally, inputs: LossInputs) -> None:
        """Add what only this loss knows of a micro-batch to its metrics; called without gradient."""

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Move controllers, given the globally merged values of `controller_inputs`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Controllers' state; empty for a loss without any."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
