"""The optimal token baseline: a baseline for each place in a group's completions, weighted by what was sampled so far."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan_rl.algorithm.episodes import set_token_advantages
from torchtitan_rl.algorithm.losses.loss import Source
from torchtitan_rl.algorithm.losses.modifiers import OwnBaseline
from torchtitan_rl.types import Episode, Group, flat

LOGPROBS = "otb_logprobs"
"""The token column with log pi before the update."""
LOG_COLLISIONS = "otb_log_collisions"
"""The token column with log sum_v pi(v)^2, the probability that two samples of the token are equal."""


class OptimalBaseline(OwnBaseline):
    """A_it = r_i - b_t, b_t = sum_i W_it r_i / sum_i W_it over the group's completions with a t-th sampled token. OTB, arXiv 2602.07078.

    W_it = sum_(j<=t) (1 - 2 pi_ij + sum_v pi_j(v)^2) stands for the squared gradient of the first t tokens' log-probability. Where only the
    longest completion has a t-th token, b_t is 0. It costs two forwards a step. As verl's `optimal_token_baseline`.
    """

    source_columns = (LOGPROBS, LOG_COLLISIONS)

    def __init__(self, config: OwnBaseline.Config) -> None:
        super().__init__(config)
        self.source_columns = (*self.loss.source_columns, *type(self).source_columns)

    def sources(self, trainer: Any) -> list[Source]:
        return [*super().sources(trainer), Collisions(trainer)]

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            rewarded = [
                episode for episode in group.samples if episode.credit.shaped_reward is not None
            ]
            weights = [path_weights(episode) for episode in rewarded]  # [num_sampled] each
            longest = max((len(of_sample) for of_sample in weights), default=0)
            weighted, total, count = np.zeros((3, longest))
            for episode, of_sample in zip(rewarded, weights, strict=True):
                weighted[: len(of_sample)] += of_sample * episode.credit.shaped_reward
                total[: len(of_sample)] += of_sample
                count[: len(of_sample)] += 1
            baselines = np.where(count > 1, weighted / (total + 1e-8), 0.0)  # [longest]
            for episode, of_sample in zip(rewarded, weights, strict=True):
                mask = episode.completion.loss_mask  # [L]
                advantages = np.zeros(len(mask))  # [L]
                advantages[mask] = episode.credit.shaped_reward - baselines[: len(of_sample)]
                set_token_advantages(episode, advantages)
        super().assign_credit(groups)


def path_weights(episode: Episode) -> np.ndarray:
    """[num_sampled] float64 W_t, cumulated over the sampled tokens."""
    columns, mask = episode.credit.token_columns, episode.completion.loss_mask  # [L]
    probability = np.exp(columns[LOGPROBS][mask].astype(np.float64))  # [num_sampled]
    collisions = np.exp(columns[LOG_COLLISIONS][mask].astype(np.float64))  # [num_sampled]
    return (1 - 2 * probability + collisions).cumsum()


class Collisions:
    """Scores a step's episodes by the policy itself, a `Source`.

    At half the temperature the policy is pi'(v) = pi(v)^2 / sum_u pi(u)^2, so log sum_u pi(u)^2 = 2 log pi(v) - log pi'(v) for any token v:
    two forwards, and nothing of [T, V].
    """

    name = "optimal_baseline"

    def __init__(self, trainer: Any) -> None:
        """`trainer`: a Trainer, of which `episode_logprobs` is called."""
        self.trainer = trainer

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set the two token columns of every episode, [L] each. Collective."""
        trainer = self.trainer
        plain = trainer.episode_logprobs(trainer.model, groups)  # [L] each
        sharp = trainer.episode_logprobs(
            trainer.model, groups, temperature=trainer.temperature / 2
        )  # [L] each
        for episode, of_plain, of_sharp in zip(flat(groups), plain, sharp, strict=True):
            episode.credit.token_columns |= {
                LOGPROBS: of_plain,
                LOG_COLLISIONS: 2 * of_plain - of_sharp,
            }
