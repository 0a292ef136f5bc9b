"""Policy losses over packed one-dimensional tensors: of tokens, and the protocol of one that spans groups."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.run.errors import expect
from torchtitan_rl.types import Episode, Group, Metric

from .aggregations import Aggregation
from .inputs import LossInputs, safe_exp


class Loss(Configurable, ABC):
    """What `algorithm.loss` may be: a `PolicyLoss` of tokens or a `ListwiseLoss` of groups."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config


class PolicyLoss(Loss):
    """A loss of each token, to be minimised. Most write only `__call__`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        """No fields of its own."""

    uses_ratio: ClassVar[bool] = True
    """Whether the ratio enters the loss; if not, nothing of it is clamped or clipped."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """The loss of each token, [T]; values outside `inputs.mask` are ignored."""

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the log of the ratio the loss uses, before any clamp; by default log rho_t = log pi - log pi_old."""
        return inputs.log_ratio

    def ratio(self, inputs: LossInputs) -> Tensor:
        """[T] the ratio the loss uses, with gradient."""
        return safe_exp(self.log_ratio(inputs))  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        """[T] bool tensors by side ("low", "high", ...): where clipping changes the gradient. Empty: it never clips."""
        return {}


class ListwiseLoss(Loss):
    """A loss that weighs a group's completions against each other, so a group must lie in one micro-batch.

    It sets mass and advantages itself, in place of `algorithm.advantage`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        """No fields of its own."""

    needs_reference: bool = False
    """Whether `weigh` reads the frozen reference's log-probabilities."""
    token_loss: PolicyLoss | None = None
    """The loss of tokens that `extra` adds, whose ratio and clipping are reported; None: there is none."""
    controller_inputs: tuple[str, ...] = ()
    """Keys of the step's merged metrics that `after_update` reads."""

    @abstractmethod
    def weigh(self, members: list[Episode]) -> None:
        """Set `mass` (summing to 1) and `advantage` of a group's completions that are in the loss, at least one.

        A group it can learn nothing from it leaves out, saying why in `left_out`.
        """

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[S] the loss of each sequence, 0 for one that is not in the loss; their sum is divided by the groups."""

    def extra(self, inputs: LossInputs, aggregation: Aggregation) -> Tensor | None:
        """0-d: what is added to the listwise part, weighted; None for nothing."""
        return None

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """(mean, weight), 0-d each, of what only this loss knows of a micro-batch; called without gradient."""
        return {}

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """What only this loss knows of the step's groups."""
        return {}

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Move controllers, given the globally merged values of `controller_inputs`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Controllers' state; empty for a loss without any."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Clip(PolicyLoss):
    """l_t = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); with dual_clip c, for A < 0, min(l_t, -c A).

    PPO arXiv 1707.06347, GRPO arXiv 2402.03300, DAPO (eps_high 0.28) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        eps_low: float = 0.2
        """Ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = 0.2
        """Ratios above 1 + eps_high get no gradient where A > 0; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = None
        """Bound on the loss where A < 0, as a multiple of |A|; None for no bound."""

        def __post_init__(self) -> None:
            expect(0 < self.eps_low <= 1, "algorithm.loss.eps_low", self.eps_low, "a number in (0, 1]", "Use 0.2.")
            expect(
                self.eps_high > 0, "algorithm.loss.eps_high", self.eps_high, "a number > 0", "Use 0.2, or 0.28 (DAPO)."
            )
            expect(
                self.dual_clip is None or self.dual_clip > 1,
                "algorithm.loss.dual_clip", self.dual_clip, "None or a number > 1", "Use 3, the paper's value.",
            )  # fmt: skip

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
        negative = inputs.advantages < 0  # [T]
        sides = {
            "low": (ratio < 1 - self.config.eps_low) & negative,  # [T]
            "high": (ratio > 1 + self.config.eps_high) & (inputs.advantages > 0),  # [T]
        }
        if self.config.dual_clip is not None:
            sides["dual"] = (ratio > self.config.dual_clip) & negative  # [T]
        return sides


class Gspo(Clip):
    """The clip loss with the sequence ratio s_i = exp(mean_t (log pi - log pi_old)). GSPO, arXiv 2507.18071.

    The gradient of s_i flows through every token of the sequence. The paper's objective is this with
    `SeqMeanTokenMean`; its clip range is far narrower than a token ratio's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        eps_low: float = 3e-4
        """Sequence ratios below 1 - eps_low get no gradient where A < 0."""
        eps_high: float = 4e-4
        """Sequence ratios above 1 + eps_high get no gradient where A > 0."""

    def of_sequence(self, inputs: LossInputs) -> Tensor:
        """[S] log s_i."""
        return inputs.sequences.mean(inputs.log_ratio)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(self.of_sequence(inputs))  # [T]

    def ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sequences.expand(safe_exp(self.of_sequence(inputs)))  # [T]


class Cispo(PolicyLoss):
    """l_t = -stopgrad(clamp(rho, floor, cap)) A log pi. CISPO, arXiv 2506.13585.

    The weight is clipped, not the gradient: every token keeps one. Both bounds are absolute, not 1 +- eps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        cap: float = 5.0
        """Largest importance weight (absolute)."""
        floor: float | None = None
        """Smallest importance weight (absolute); None for no bound, as in the paper's experiments."""

        def __post_init__(self) -> None:
            expect(
                self.cap > 0, "algorithm.loss.cap", self.cap, "a number > 0", "Use 5; for a bound 1 + eps give 1 + eps."
            )
            expect(
                self.floor is None or 0 <= self.floor <= self.cap, "algorithm.loss.floor", self.floor,
                f"None or a number in [0, cap ({self.cap})]", "Use None; for a bound 1 - eps give 1 - eps.",
            )  # fmt: skip

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight = self.ratio(inputs).detach().clamp(min=self.config.floor, max=self.config.cap)  # [T]
        return -weight * inputs.advantages * inputs.logprobs  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        return {"low": ratio < (self.config.floor or 0.0), "high": ratio > self.config.cap}  # [T] each


class Reinforce(PolicyLoss):
    """l_t = -A log pi: no ratio, no clipping. Williams 1992."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        """No fields."""

    uses_ratio = False

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs  # [T]
