"""How far the trainer's log-probabilities of the sampled tokens are from the sampler's, by episode."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl import comm
from torchtitan_rl.models.score import TokenScores
from torchtitan_rl.trainer.packing import by_member
from torchtitan_rl.types import Episode, FloatArray, Group, LogprobDiff, TrainBatch, flat


def token_rows(batch: TrainBatch, scores: TokenScores) -> Tensor:
    """Returns the scores of the M loss tokens as one tensor, for the way to the host: log pi, entropy and the teacher's columns,
    [2 + columns, M]."""
    rows = torch.stack([scores.logprobs, scores.entropy, *scores.columns.values()])
    return rows.detach()[:, batch.loss_positions]


def fill_logprob_diff(batch: TrainBatch, rows: FloatArray) -> FloatArray:
    """Set `logprob_diff` of the batch's episodes, given log pi before the first update and its entropy: [2, M] of `token_rows`.

    Returns: log pi - log mu, log mu, and log pi + entropy of the fresh tokens, [3, fresh loss tokens].
    """
    differences = [np.empty((3, 0), rows.dtype)]  # [3, fresh loss tokens of an episode] each
    for member, of_member in zip(batch.members, by_member(batch, rows), strict=True):
        logprobs, entropy = of_member  # [num_sampled] each
        completion = member.episode.completion
        log_mu = completion.sampled_logprobs  # [num_sampled]
        diff = logprobs - log_mu  # [num_sampled]
        is_fresh = completion.fresh_mask[completion.loss_mask]  # [num_sampled]
        fresh = np.stack([diff, log_mu, logprobs + entropy])[
            :, is_fresh
        ]  # [3, its fresh loss tokens]
        differences.append(fresh)
        sizes = np.abs(fresh[0])  # [its fresh loss tokens]
        mean = float(sizes.sum(dtype=np.float64)) / max(len(sizes), 1)
        most = float(sizes.max(initial=0.0))  # NaN counts as the largest
        tokens = {"diff": diff, "entropy": entropy}
        member.episode.logprob_diff = LogprobDiff(mean=mean, max=most, tokens=tokens)
    return np.concatenate(differences, axis=1)


def share_measurements(
    groups: Sequence[Group[Episode]], columns: Sequence[str], *, mine: bool
) -> None:
    """Give every rank what each has measured on the episodes that it trained: `logprob_diff`, and the named token columns. Collective.

    Args:
        mine: whether this rank gives its own. Tensor-parallel ranks have the same.
    """
    episodes = flat(groups)
    own: list[tuple[int, LogprobDiff | None, dict[str, FloatArray]]] = []
    for i, episode in enumerate(episodes):
        known = episode.credit.token_columns
        found = {name: known[name] for name in columns if name in known}
        if mine and (found or episode.logprob_diff is not None):
            own.append((i, episode.logprob_diff, found))
    for i, diff, found in comm.all_gather_lists(own):
        episodes[i].logprob_diff = episodes[i].logprob_diff or diff
        episodes[i].credit.token_columns |= found
