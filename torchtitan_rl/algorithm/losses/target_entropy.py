"""Skywork-OR1's entropy bonus that holds a target."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan_rl.algorithm.aggregation import Aggregation
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.losses.modifier import Modifier
from torchtitan_rl.fields.number import number
from torchtitan_rl.summary import same_everywhere
from torchtitan_rl.types import Metric

ENTROPY = "policy/entropy"


class TargetEntropy(Modifier):
    """l - c H(pi), c the entropy bonus that holds the entropy at a target. Skywork-OR1, arXiv 2505.22312.

    After each step c rises by `step` if the step's entropy is at most `target`, else falls by it, between 0 and `most`. The bonus is
    given only while the last step's entropy is at most `target`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Modifier.Config):
        target: float = number(0.2, above=0)
        """The entropy to keep, in nats per token."""
        step: float = number(0.005, above=0)
        """The change of c in one step."""
        most: float = number(1.0, above=0)
        """The largest c."""

    ignores = ("entropy_coef",)
    controller_inputs = (ENTROPY,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._set_bonus(0.0, False)

    def _set_bonus(self, coef: float, active: bool) -> None:
        self.coef, self.active = coef, active
        self.zero_without_advantage = not active and self.loss.zero_without_advantage

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        terms = super().terms(inputs, aggregation)
        if self.active:
            bonus = self.coef * (inputs.entropy * inputs.mask).sum()  # 0-d
            terms["policy"] = terms["policy"] - bonus / max(inputs.normalizers.num_tokens, 1)
        return terms

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        coef = same_everywhere(self.coef if self.active else 0.0)
        metrics = super().after_update(stats) | {"entropy/coef": coef}
        if ENTROPY in stats:
            active = stats[ENTROPY] <= self.config.target
            moved = self.coef + (self.config.step if active else -self.config.step)
            self._set_bonus(min(max(moved, 0.0), self.config.most), active)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"coef": self.coef, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._set_bonus(state["coef"], state["active"])
