"""Losses that weigh a group's completions against each other. The weights are the masses of a group: they sum to 1."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from torchtitan_rl.algorithm.advantages import Grpo
from torchtitan_rl.algorithm.algorithm import Algorithm
from torchtitan_rl.algorithm.losses.loss import (
    Aggregation,
    Loss,
    LossInputs,
    Sequences,
    TokenMean,
    check_values,
)
from torchtitan_rl.algorithm.mismatch import NoCorrection
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.types import Episode, Group, TrainBatch

MASS = "mass"
"""In `Credit.columns`: the episode's share of its group's mass; 0 outside the loss."""


class ListwiseLoss(Loss):
    """A loss of groups: a subclass returns the loss of each sequence, and may set masses in `weigh`.

    The loss sets advantages itself; `algorithm.advantage` is not used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        def check_objective(self, objective: Algorithm.Config) -> None:
            """Raise UserError for settings of token losses, which have no effect here."""
            alone = not self.has_token_loss()
            aggregates = alone and type(objective.aggregation) is not TokenMean.Config
            corrects = alone and not isinstance(objective.mismatch, NoCorrection.Config)
            for name, wrong, expected, remedy in (
                (
                    "kl.coef",
                    objective.kl.coef != 0,
                    "0",
                    "MaxEnt has algorithm.loss.beta; others add their own term.",
                ),
                (
                    "credit",
                    objective.credit != "episode",
                    "episode",
                    "It weighs whole completions.",
                ),
                (
                    "seed_grpo",
                    objective.seed_grpo is not None,
                    "None",
                    "The loss sets advantages itself.",
                ),
                (
                    "advantage",
                    type(objective.advantage) is not Grpo.Config,
                    "the default",
                    "Set Grpo.Config().",
                ),
                (
                    "aggregation",
                    aggregates,
                    "the default",
                    "The sum is divided by the groups: set TokenMean.Config().",
                ),
                (
                    "mismatch",
                    corrects,
                    "no correction",
                    "It weighs tokens, as of MaxEnt's clip loss (clip_coef > 0).",
                ),
            ):
                value = attrgetter(name)(objective)
                expect(
                    not wrong,
                    f"algorithm.{name}",
                    value,
                    f"{expected} with a listwise loss",
                    remedy,
                )

        def has_token_loss(self) -> bool:
            """Whether tokens have an additional loss of their own, which a mismatch correction weighs."""
            return False

    uses_advantages = False
    whole_groups = True
    sequence_columns = (MASS,)

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

    def check_batch(self, batch: TrainBatch) -> None:
        check_whole_groups(batch)

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


def check_whole_groups(batch: TrainBatch) -> None:
    """Raise ValueError if a group is split over micro-batches, which would silently change a listwise loss.

    The masses of a whole group's sequences with loss tokens add up to 1.
    """
    present = Sequences(batch.sequence_ids, batch.loss_mask, len(batch.group_ids)).present  # [S]
    same_group = batch.group_ids[:, None] == batch.group_ids[None, :]  # [S, S]
    mass = (same_group * (batch.columns[MASS] * present)[None, :]).sum(dim=1)  # [S]
    broken = present & ((mass - 1).abs() > 1e-3)  # [S]
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"prompt {int(batch.group_ids[first])}: its masses sum to {float(mass[first]):.4f} in this micro-batch, "
            "expected 1. A listwise loss needs whole groups: the packer must keep a prompt's completions together "
            "(Loss.whole_groups)."
        )
