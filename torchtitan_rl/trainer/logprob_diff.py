"""How far the trainer's log-probabilities of the sampled tokens are from the sampler's, by episode."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from torchtitan_rl import comm
from torchtitan_rl.models.score import TokenScores
from torchtitan_rl.trainer.gate import ComparedTokens
from torchtitan_rl.trainer.packing import by_member, completion_values
from torchtitan_rl.types import Episode, FloatArray, Group, LogprobDiff, TrainBatch, flat


def compare_with_sampler(batch: TrainBatch, scores: TokenScores) -> ComparedTokens:
    """Set `logprob_diff` of the batch's episodes. Returns the tokens of the newest weights, for the gate.

    Args:
        scores: [M] at the batch's `loss_positions`, before the first update; on the host.
    """
    both = np.stack([scores.logprobs.numpy(), scores.entropy.numpy()])  # [2, M]
    compared = [np.empty((3, 0), both.dtype)]  # [3, fresh loss tokens of an episode] each
    for member, values in zip(batch.members, by_member(batch, both), strict=True):
        logprobs, entropy = values  # [num_sampled] each
        completion = member.episode.completion
        log_mu = completion.sampled_logprobs  # [num_sampled]
        diff = logprobs - log_mu  # [num_sampled]
        is_fresh = completion.fresh_mask[completion.loss_mask]  # [num_sampled]
        sizes = np.abs(diff[is_fresh])
        member.episode.logprob_diff = LogprobDiff(
            mean=float(sizes.sum(dtype=np.float64)) / max(len(sizes), 1),
            max=float(sizes.max(initial=0.0)),  # NaN counts as the largest
            tokens={"diff": diff, "entropy": entropy},
        )
        tokens = np.stack([diff, log_mu, logprobs + entropy])  # [3, num_sampled]
        compared.append(tokens[:, is_fresh])
    return ComparedTokens(*np.concatenate(compared, axis=1))


def keep_columns(batch: TrainBatch, columns: Mapping[str, Tensor]) -> None:
    """Give the batch's episodes their part of a teacher's columns [M], which are on the host."""
    for name, values in columns.items():
        parts = completion_values(batch, values.float().numpy())  # [L] each
        for member, of_member in zip(batch.members, parts, strict=True):
            member.episode.credit.token_columns[name] = of_member


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
        measured = {name: known[name] for name in columns if name in known}
        if mine and (measured or episode.logprob_diff is not None):
            own.append((i, episode.logprob_diff, measured))
    for i, diff, measured in comm.all_gather_lists(own):
        episodes[i].logprob_diff = episodes[i].logprob_diff or diff
        episodes[i].credit.token_columns |= measured
