"""Losses that weigh a group's completions against each other. The weights are the masses of a group: they sum to 1."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from torchtitan_rl.algorithm.aggregation import Aggregation
from torchtitan_rl.algorithm.losses.loss import Loss, check_values
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.unused import expect_defaults
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Episode, Group

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm

MASS = "mass"
"""In `Credit.columns`: the episode's share of its group's mass; 0 outside the loss."""


class ListwiseLoss(Loss):
    """A loss of groups: a subclass returns the loss of each sequence, and may set masses in `weigh`.

    The loss sets advantages itself; `algorithm.advantage` is not used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        def check_objective(self, objective: "Algorithm.Config") -> None:
            """Raise UserError for settings of token losses, which have no effect here."""
            names = ("kl.coef", "credit", "seed_grpo", "advantage")
            if not self.has_token_loss():
                names += ("aggregation", "mismatch")
            expect_defaults(objective, names, "a listwise loss, which weighs whole completions")

        def has_token_loss(self) -> bool:
            """Whether tokens have an additional loss of their own, which a mismatch correction weighs."""
            return False

    learns_from = "rewards"
    whole_groups = True
    reads = (MASS,)

    def weigh(self, members: list[Episode]) -> None:
        """Set `credit.columns["mass"]` and `credit.advantage` of a group's completions in the loss. The masses sum to 1.

        Here the masses are equal, and the advantage, which only the tables show, is the reward minus the group's mean. If the
        group teaches nothing, an override leaves it out and sets the reason in `left_out`.

        Args:
            members: at least one completion.
        """
        mean = math.fsum(episode.credit.shaped_reward for episode in members) / len(members)
        for episode in members:
            episode.credit.columns[MASS] = 1 / len(members)
            episode.credit.advantage = episode.credit.shaped_reward - mean

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """[S] the loss of each sequence, 0 outside the loss. Their sum is divided by the number of groups."""

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            for episode in group.samples:
                episode.credit.columns[MASS] = 0.0
            members = [episode for episode in group.samples if episode.in_loss]
            if members:
                self.weigh(members)
                check_masses(self, members)

    def terms(self, inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        losses = self(inputs)  # [S]
        check_values("algorithm.loss", self, losses, inputs.sequences.present.shape)
        return {"policy": losses.sum() / max(inputs.normalizers.num_groups, 1)}


def check_masses(loss: ListwiseLoss, members: Sequence[Episode]) -> None:
    """Raise UserError if `weigh` has not given the group's episodes that are left in the loss masses that sum to 1."""
    masses = [episode.credit.columns[MASS] for episode in members if episode.in_loss]
    total = sum(map(float, masses))
    if masses and abs(total - 1) > 1e-3:  # NaN is named by its completion
        raise UserError(
            f"algorithm.loss: {type(loss).__qualname__}.weigh set masses that sum to {total:.4g}: expected 1 over the group's "
            "completions in the loss. Divide them by their sum."
        )
