"""What the sampler sampled is what the optimizer sees: measured on every token, and a reason to stop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.run.errors import TrainingStopped
from torchtitan_rl.types import Episode, TrainBatch


class LogprobGateError(TrainingStopped):
    """Trainer and sampler disagree on the tokens that were sampled. The optimizer has not stepped."""


class LogprobGate(Configurable):
    """Stops the run when |log π(token) - log μ(token)| exceeds a bound before the first update of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        max_diff: float | None = None
        """Largest allowed difference of one token's log-probability; None only reports it. fp32 stays under 1e-4; bf16
        differs by tenths on rare tokens."""

    def __init__(self, config: Config) -> None:
        self.max_diff = config.max_diff

    def check(self, max_diff: float) -> None:
        """Raise LogprobGateError when `max_diff`, the same on every rank, is over the bound (or NaN)."""
        if self.max_diff is None or max_diff <= self.max_diff:
            return
        raise LogprobGateError(
            f"sampler/logprob_diff/max is {max_diff:.3g}, over trainer.logprob_gate.max_diff {self.max_diff:.3g}: the "
            "sampler did not sample from the policy that is being trained. Likely causes: stale weights (a weight not "
            "synced, or synced under another name), a stale prefix cache, a temperature that the trainer does not mirror, "
            "or top_p / top_k truncation. The update was not applied."
        )


def fill_logprob_diff(batch: TrainBatch, logprobs: Tensor, episodes: Sequence[Episode]) -> float:
    """Set `logprob_diff_mean` and `_max` of the batch's episodes; the batch's largest difference (infinite if any is NaN).

    Args:
        logprobs: [T] log π of the policy that sampled.
        episodes: the list that `batch.episode_indices` refers to.
    """
    diff = ((logprobs - batch.sampler_logprobs).abs() * batch.loss_mask).tolist()  # [T]
    mask, owner = batch.loss_mask.tolist(), batch.sequence_ids.tolist()
    found: dict[int, list[float]] = {}
    for value, counted, sequence in zip(diff, mask, owner, strict=True):
        if counted:
            found.setdefault(sequence, []).append(value)
    largest = 0.0
    for sequence, values in found.items():
        episode = episodes[batch.episode_indices[sequence]]
        episode.logprob_diff_mean = sum(values) / len(values)
        episode.logprob_diff_max = max(values, key=lambda v: (v != v, v))  # NaN counts as the largest
        largest = max(largest, math.inf if math.isnan(episode.logprob_diff_max) else episode.logprob_diff_max)
    return largest
