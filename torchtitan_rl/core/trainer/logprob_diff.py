"""How far the trainer's log-probabilities of the sampled tokens are from the sampler's, by episode."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.core import comm
from torchtitan_rl.core.types import Episode, FloatArray, Group, LogprobDiff, TrainBatch, flat


def diff_rows(batch: TrainBatch, logprobs: Tensor, **others: Tensor) -> Tensor:
    """Returns what `fill_logprob_diff` reads, on the device: [5 + others, T].

    Args:
        logprobs: [T] the trainer's, computed before the first update.
        others: [T] each.
    """
    fresh = batch.loss_mask if batch.fresh_mask is None else batch.fresh_mask  # [T]
    log_mu = batch.sampler_logprobs  # [T]
    sequence_ids = batch.sequence_ids.float()  # [T]
    rows = [batch.loss_mask, fresh, sequence_ids, log_mu, logprobs - log_mu, *others.values()]
    return torch.stack(rows)


def fill_logprob_diff(
    batch: TrainBatch, rows: FloatArray, others: Sequence[str] = ()
) -> FloatArray:
    """Set `logprob_diff` of the batch's episodes from its `diff_rows` [5 + others, T], which are on the host now.

    `others` [T] each are kept beside the differences of the tokens.

    Returns: |log pi - log mu| and log mu of the fresh tokens, [2, fresh loss tokens].
    """
    rows = rows[:, rows[0] > 0]  # [5 + others, loss tokens]
    rows = rows[:, np.argsort(rows[2], kind="stable")]  # a sequence's traces may lie apart
    _, fresh, sequence_ids, log_mu, signed, *rest = rows  # [loss tokens] each
    is_fresh = fresh > 0  # [loss tokens]
    sequence_ids = sequence_ids.astype(np.int64)  # [loss tokens]
    lengths = np.bincount(sequence_ids, minlength=len(batch.members))  # [S]
    end = 0
    for member, length in zip(batch.members, lengths, strict=False):
        begin, end = end, end + length
        if length > 0:
            diff = signed[begin:end]  # [loss tokens of the episode]
            values = np.abs(diff[is_fresh[begin:end]])  # [its fresh loss tokens]
            total = float(values.sum(dtype=np.float64))
            mean = total / max(len(values), 1)
            most = float(values.max(initial=0.0))  # NaN counts as the largest
            tokens = {"diff": diff}
            for name, row in zip(others, rest, strict=True):
                tokens[name] = row[begin:end]
            member.episode.logprob_diff = LogprobDiff(mean=mean, max=most, tokens=tokens)
    return np.stack([np.abs(signed), log_mu])[:, is_fresh]  # [2, fresh loss tokens]


def share_logprob_diffs(groups: Sequence[Group[Episode]], *, mine: bool) -> None:
    """Set every episode's `logprob_diff` on every rank. Collective.

    Args:
        mine: whether this rank gives its own. Tensor-parallel ranks have the same.
    """
    episodes = flat(groups)
    own: list[tuple[int, LogprobDiff]] = []
    for i, episode in enumerate(episodes):
        if mine and episode.logprob_diff is not None:
            own.append((i, episode.logprob_diff))
    for i, diff in comm.all_gather_lists(own):
        episodes[i].logprob_diff = episodes[i].logprob_diff or diff
