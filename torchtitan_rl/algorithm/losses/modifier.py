"""The base of token losses made of another token loss, `loss`: with a mask, a penalty, a bonus or another baseline.

They nest, with the outer one first. Example: SquaredLogRatio.Config(loss=Dppo.Config()) is prime-rl's default. `TargetEntropy` adds a
term beside the tokens' losses, so it is the outermost.
"""

from abc import ABC
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.loss import Loss, TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode, Group, Metric


class Modifier(TokenLoss, ABC):
    """The loss `loss`, as it is. A subclass changes one thing; what it does not override is that of `loss`. What it `reads` is added."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        loss: TokenLoss.Config = field(default_factory=Clip.Config)
        """The loss that is changed."""

        def check_objective(self, objective: OwnConfig.Config) -> None:
            TokenLoss.Config.check_objective(self, objective)
            self.loss.check_objective(objective)
            name, loss = self._owner.__name__, self.loss.build()
            if not isinstance(loss, TokenLoss) or type(loss).terms is not TokenLoss.terms:
                expected = f"a loss without terms beside its tokens', which {name} would lose"
                remedy = "A modifier with a term goes outside."
                expect(False, f"{name}.loss", self.loss, expected, remedy)
            source = self._owner.needs_loss_of
            expected = f"a loss that learns from {' or '.join(source)}, or {name} has no effect"
            matches = loss.learns_from in source
            expect(matches, f"{name}.loss", self.loss, expected, "Use Clip.Config().")

    needs_loss_of: ClassVar[tuple[str, ...]] = (
        "advantages",
        "rewards",
        "samples",
        "demonstrations",
    )
    """The values of `learns_from` of losses on which the modifier has an effect."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loss = config.loss.build()
        for name in Loss.__annotations__:
            own, value = getattr(self, name), getattr(self.loss, name)
            if isinstance(own, tuple):
                value = (*value, *own)
            elif own != getattr(Loss, name):
                value = own
            setattr(self, name, value)
        # A subclass that adds nothing of its own says so, as any loss does for itself alone.
        own = type(self).zero_without_advantage
        self.zero_without_advantage = own and self.loss.zero_without_advantage

    def __call__(self, inputs: LossInputs) -> Tensor:
        return self.loss(inputs)  # [T]

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        self.loss.assign_credit(groups)

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        return self.loss.group_metrics(groups)

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        return self.loss.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])


class OwnBaseline(Modifier, ABC):
    """A modifier that sets the advantages itself."""

    needs_loss_of = ("advantages",)
    ignores = ("advantage", "credit", "zero_variance", "seed_grpo")
    learns_from = "rewards"
