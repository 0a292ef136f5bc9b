"""Policy losses over packed one-dimensional tensors: token losses, and the interface of losses that span groups."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torchtitan_rl.core.algorithm.advantages import Grpo
from torchtitan_rl.core.algorithm.aggregations import Aggregation
from torchtitan_rl.core.algorithm.inputs import LossInputs, safe_exp
from torchtitan_rl.core.algorithm.mismatch import NoCorrection
from torchtitan_rl.core.algorithm.returned import tensor_from
from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.own_config import OwnConfig
from torchtitan_rl.core.types import Episode, Group, Metric

if TYPE_CHECKING:
    from torchtitan_rl.core.algorithm.algorithm import Algorithm


class Loss(OwnConfig, ABC):
    """The base of `algorithm.loss`: a `PolicyLoss` of tokens or a `ListwiseLoss` of groups. Both may have controllers."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        def check_objective(self, objective: "Algorithm.Config") -> None:
            """Raise UserError if a setting of the objective has no effect with this loss."""

    needs_reference: bool = False
    """Whether the loss reads the frozen reference's log-probabilities."""
    controller_inputs: tuple[str, ...] = ()
    """Keys of the step's merged metrics that `after_update` reads."""

    def validate_group_size(self, n: int) -> None:
        """Raise UserError if the loss does not work with groups of n completions."""

    @abstractmethod
    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        """This micro-batch's share of the loss, as "policy", and those of its parts to report; 0-d each."""

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics of a micro-batch that are specific to this loss: (mean, weight), 0-d each. Called without gradient."""
        return {}

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Metrics of the step's groups that are specific to this loss."""
        return {}

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Update the controllers, given the merged values of `controller_inputs`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The controllers' state; empty without controllers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class PolicyLoss(Loss):
    """A loss for each token, to be minimised. Most subclasses write only `__call__`."""

    uses_ratio: ClassVar[bool] = True
    """Whether the loss uses the ratio; otherwise nothing is clamped or clipped."""
    silent_without_advantage: ClassVar[bool] = False
    """Whether tokens with advantage 0 have zero gradient, so that such completions need no backward pass. Not inherited: each
    class says it for itself."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[T] the loss of each token; values outside `inputs.mask` are ignored."""

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        what = "[T], a loss for each packed token. Leave sums and means to algorithm.aggregation."
        losses = tensor_from(self, "algorithm.loss", self(inputs), inputs.mask.shape, what)  # [T]
        return {"policy": aggregation.share(losses * inputs.correction, inputs)}

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the log of the ratio that the loss uses, before clamping; by default log rho_t = log pi - log pi_old."""
        return inputs.log_ratio

    def ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the ratio that the loss uses, with gradient."""
        return safe_exp(self.log_ratio(inputs))  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] bool tensors by side ("low", "high", ...), true where clipping changes the gradient. Empty: no clipping."""
        return {}


class ListwiseLoss(Loss):
    """A loss that weighs a group's completions against each other. A group must be in one micro-batch.

    The loss sets masses and advantages itself; `algorithm.advantage` is not used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        def check_objective(self, objective: "Algorithm.Config") -> None:
            """Raise UserError for settings of token losses, which have no effect here."""
            corrects = not isinstance(objective.mismatch, NoCorrection.Config)
            weighs_tokens = corrects and not getattr(self, "clip_coef", 0)
            for name, wrong, expected, remedy in (
                ("kl.coef", objective.kl.coef != 0, "0", "MaxEnt's reference term is algorithm.loss.beta."),
                ("credit", objective.credit != "episode", "episode", "It weighs whole completions."),
                ("seed_grpo", objective.seed_grpo is not None, "None", "The loss sets advantages itself."),
                ("advantage", type(objective.advantage) is not Grpo.Config, "the default", "Leave the field out."),
                ("mismatch", weighs_tokens, "no correction", "It weighs tokens: add the clip loss with clip_coef > 0."),
            ):
                value = attrgetter(name)(objective)
                expect(not wrong, f"algorithm.{name}", value, f"{expected} with a listwise loss", remedy)

    token_loss: PolicyLoss | None = None
    """An additional token loss, whose ratio and clipping are reported; None: there is none."""

    @abstractmethod
    def weigh(self, members: list[Episode]) -> None:
        """Set `mass` and `advantage` of a group's completions in the loss. The masses sum to 1.

        If the group teaches nothing, the loss leaves it out and sets the reason in `left_out`.

        Args:
            members: at least one completion.
        """

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[S] the loss of each sequence, 0 outside the loss. Their sum is divided by the number of groups."""

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        what = "[S], a loss for each sequence, 0 outside the loss. Their sum is taken for you."
        losses = tensor_from(self, "algorithm.loss", self(inputs), inputs.mass.shape, what)  # [S]
        return {"policy": losses.sum() / max(inputs.normalizers.num_groups, 1)}


class Clip(PolicyLoss):
    """l_t = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with dual_clip c, for A < 0, min(l_t, -c A).

    PPO arXiv 1707.06347, GRPO arXiv 2402.03300, DAPO (eps_high 0.28) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """

    silent_without_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        eps_low: float = number(0.2, above=0, most=1)
        """Ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = number(0.2, above=0, most=math.inf)
        """Ratios above 1 + eps_high get no gradient where A > 0; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = number(None, above=1, remedy="Use 3, the paper's value.")
        """Bound on the loss where A < 0, as a multiple of |A|; None for no bound."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        advantages = inputs.advantages  # [T]
        ratio = self.ratio(inputs)  # [T]
        bounded = ratio.clamp(1 - self.config.eps_low, 1 + self.config.eps_high)  # [T]
        losses = -torch.minimum(ratio * advantages, bounded * advantages)  # [T]
        if self.config.dual_clip is None:
            return losses
        ceiling = torch.minimum(losses, -self.config.dual_clip * advantages)  # [T]
        return torch.where(advantages < 0, ceiling, losses)  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] each: "low", "high", and with dual_clip "dual"."""
        negative = inputs.advantages < 0  # [T]
        sides = {
            "low": (ratio < 1 - self.config.eps_low) & negative,  # [T]
            "high": (ratio > 1 + self.config.eps_high) & (inputs.advantages > 0),  # [T]
        }
        if self.config.dual_clip is not None:
            sides["dual"] = (ratio > self.config.dual_clip) & negative  # [T]
        return sides
