"""The optimal token baseline: a baseline for each place in a group's completions, weighted by what was sampled so far."""

import numpy as np

from torchtitan_rl.algorithm.episodes import set_token_advantages
from torchtitan_rl.algorithm.losses.modifier import OwnBaseline
from torchtitan_rl.types import Episode, Group

LOGPROBS = "otb_logprobs"
"""The token column with log pi before the update."""
LOG_COLLISIONS = "otb_log_collisions"
"""The token column with log sum_v pi(v)^2, the probability that two samples of the token are equal."""


class OptimalBaseline(OwnBaseline):
    """A_it = r_i - b_t, b_t = sum_i W_it r_i / sum_i W_it over the group's completions with a t-th sampled token. OTB, arXiv 2602.07078.

    W_it = sum_(j<=t) (1 - 2 pi_ij + sum_v pi_j(v)^2) stands for the squared gradient of the first t tokens' log-probability. Where only the
    longest completion has a t-th token, b_t is 0. It costs two forwards a step (`Collisions` in trainer/teachers/frozen_models.py). As verl's `optimal_token_baseline`.
    """

    reads = (LOGPROBS, LOG_COLLISIONS)
    zero_without_advantage = True

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
    # Rounding makes the terms of certain tokens negative, and then a sum near 0 would be divided by.
    return np.maximum(1 - 2 * probability + collisions, 0).cumsum()
