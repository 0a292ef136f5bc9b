"""What the sampler sampled is what the optimizer sees: measured on every token, and a reason to stop."""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.run.errors import TrainingStopped
from torchtitan_rl.types import TrainBatch


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


def fill_logprob_diff(batch: TrainBatch, logprobs: Tensor) -> float:
    """Set `logprob_diff`, its mean and max of the batch's episodes; the batch's largest difference (infinite if any is NaN).

    Args:
        logprobs: [T] log π of the policy that sampled.
    """
    counted = batch.loss_mask.cpu().numpy() > 0  # [T]
    signed = (logprobs - batch.sampler_logprobs).cpu().numpy()[counted]  # [loss tokens]
    lengths = np.bincount(batch.sequence_ids.cpu().numpy()[counted], minlength=len(batch.members))  # [S]
    largest = 0.0
    for member, diff in zip(batch.members, np.split(signed, np.cumsum(lengths))[:-1], strict=True):
        if len(diff):
            values = np.abs(diff)
            member.episode.logprob_diff = diff
            member.episode.logprob_diff_mean = float(values.mean(dtype=np.float64))
            member.episode.logprob_diff_max = float(values.max())  # NaN counts as the largest
            largest = max(largest, math.inf if np.isnan(values).any() else member.episode.logprob_diff_max)
    return largest
