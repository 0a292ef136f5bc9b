"""Stops training if trainer and sampler disagree on the log-probabilities of the sampled tokens."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.core import comm
from torchtitan_rl.core.config import number
from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.errors import SamplerFault
from torchtitan_rl.core.types import Episode, FloatArray, Group, LogprobDiff, TrainBatch, flat

EDGES = np.logspace(-8, 2, 101)
"""Edges of the histogram's bins. A quantile read from it is at most a quarter too high."""

GROWTH, HISTORY, FIRST = 20.0, 20, 3
"""The limit on a step's mean and 99th percentile: GROWTH times their median over the last HISTORY steps, once FIRST
steps are known."""

FLOORS = {
    "float32": {"mean": 5e-6, "p99": 2e-5},
    "bfloat16": {"mean": 1e-3, "p99": 2e-2},
}
"""Values up to these never stop training, by the coarser dtype of trainer and engine. In float32 a healthy mean is
about 4e-7. In bfloat16 the difference grows with the policy's entropy."""

FIRST_LIMITS = {
    "float32": {"mean": 1e-3, "p99": 2e-2},
    "bfloat16": {"mean": math.inf, "p99": math.inf},
}
"""The limits until FIRST steps are known."""

ONE_TOKEN = {"float32": 1e-3, "bfloat16": 0.5}
"""A step in which one token differs by this, and no other, stays below the limit on the mean, however few tokens it
has."""

QUANTILE_TOKENS = 500
"""The 99th percentile of fewer tokens is not checked: it depends on five of them at most."""


class LogprobGateError(SamplerFault):
    """Trainer and sampler disagree on the sampled tokens. Raised before the optimizer step."""


@dataclass
class LogprobDiffs:
    """Distribution of |log pi(token) - log mu(token)| over sampled tokens. Adds up over micro-batches and ranks."""

    counts: FloatArray = field(default_factory=lambda: np.zeros(len(EDGES) + 1))  # [bins]
    total: float = 0.0
    largest: float = 0.0
    """The largest difference; infinite if any is NaN."""

    def add(self, values: FloatArray) -> None:
        """Add `values` [tokens]. Those that are not finite count only for `largest`."""
        finite = values[np.isfinite(values)]
        bins = np.searchsorted(EDGES, finite)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.total += float(finite.sum(dtype=np.float64))
        if np.isnan(values).any():
            self.largest = math.inf
        elif len(values):
            self.largest = max(self.largest, float(values.max()))

    def merged(self) -> "LogprobDiffs":
        """Returns the distribution over all ranks, on each of them. Collective."""
        if dist.get_world_size() == 1:
            return self
        counts = torch.tensor([*self.counts, self.total], dtype=torch.float64)  # [bins + 1]
        largest = torch.tensor([self.largest], dtype=torch.float64)  # [1]
        counts, largest = counts.to(DEVICE_TYPE), largest.to(DEVICE_TYPE)
        dist.all_reduce(counts)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        *counts, total, largest = torch.cat([counts, largest]).tolist()
        return LogprobDiffs(np.array(counts), total, largest)

    def summary(self) -> dict[str, float]:
        """Returns {"mean": ..., "p99": ...}, or {} without tokens."""
        number = self.counts.sum()
        if not number:
            return {}
        bin_of_p99 = int(np.searchsorted(self.counts.cumsum(), 0.99 * number))
        upper_edge = EDGES[min(bin_of_p99, len(EDGES) - 1)]
        return {"mean": self.total / number, "p99": float(upper_edge)}


class LogprobGate(Configurable):
    """Checks a batch's differences before its first update.

    By default it compares them with the run's earlier steps, so no limit for a dtype or a model is needed. Checkpoints
    hold what it knows of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        max_diff: float | None = number(
            None, above=0, remedy="Leave it out for no limit on single tokens."
        )
        """Largest allowed difference of one token's log-probability. None: no limit. fp32 stays under 1e-4; bf16
        differs by tenths on rare tokens."""

        distribution: bool = True
        """Stop if the mean or the 99th percentile of a step's differences is over 20 times its median in the last 20
        steps and over the dtype's floor (FLOORS). With any dtype, it means that weights or a cache are no longer the
        policy's."""

    def __init__(self, config: Config, *, dtypes: set[str]) -> None:
        """`dtypes`: those in which the trainer and the engine compute."""
        self.config = config
        self._dtype = "float32" if dtypes == {"float32"} else "bfloat16"
        self._before: dict[str, deque[float]] = {
            name: deque(maxlen=HISTORY) for name in FLOORS[self._dtype]
        }

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """Returns the means and 99th percentiles of the last steps under the dtype in which they were measured."""
        return {self._dtype: {name: list(before) for name, before in self._before.items()}}

    def load_state_dict(self, state_dict: dict[str, dict[str, list[float]]]) -> None:
        """Restore what `state_dict` returned. A run that goes on in another dtype begins anew."""
        for name, values in state_dict.get(self._dtype, {}).items():
            self._before[name].extend(values)

    def check(self, diffs: LogprobDiffs) -> None:
        """Raise LogprobGateError if `diffs`, the same on every rank, are over a limit. NaN is over `max_diff` alone."""
        limit = self.config.max_diff
        if limit is not None and not diffs.largest <= limit:
            raise _error("max", diffs.largest, f"trainer.logprob_gate.max_diff {limit:.3g}")
        number = diffs.counts.sum()
        for name, value in diffs.summary().items():
            before = self._before[name]
            if name == "p99" and number < QUANTILE_TOKENS:
                continue
            highest, bound = self._limit(name)
            if name == "mean":
                highest += ONE_TOKEN[self._dtype] / number
            if self.config.distribution and value > highest:
                raise _error(name, value, bound)
            before.append(value)

    def _limit(self, name: str) -> tuple[float, str]:
        """Returns the limit on the mean or the 99th percentile of the next step, and what it is, for the error."""
        before, floor = self._before[name], FLOORS[self._dtype][name]
        if len(before) < FIRST:
            highest = FIRST_LIMITS[self._dtype][name]
            return highest, f"{highest:g}, the limit in {self._dtype} until {FIRST} steps are known"
        median = statistics.median(before)
        if GROWTH * median < floor:
            known = f"the {len(before)} steps before have a median of {median:.3g}"
            return floor, f"{floor:g}, the floor in {self._dtype} ({known})"
        known = f"{GROWTH:g} x the median {median:.3g} of the {len(before)} steps before"
        return GROWTH * median, known


def _error(which: str, value: float, bound: str) -> LogprobGateError:
    return LogprobGateError(
        f"sampler/logprob_diff/{which} is {value:.3g}, over {bound}: the sampler did not sample from the policy "
        "that is being trained. Likely causes: stale weights, a stale prefix cache, a temperature that the trainer "
        "does not mirror, or other tokens kept by top_p, top_k or min_p than were recorded. The update was not applied."
    )


def diff_rows(batch: TrainBatch, logprobs: Tensor, **others: Tensor) -> Tensor:
    """Returns what `fill_logprob_diff` reads, on the device: [4 + others, T].

    Args:
        logprobs: [T] the trainer's, computed before the first update.
        others: [T] each.
    """
    fresh = batch.loss_mask if batch.fresh_mask is None else batch.fresh_mask  # [T]
    signed = logprobs - batch.sampler_logprobs  # [T]
    sequence_ids = batch.sequence_ids.float()  # [T]
    return torch.stack([batch.loss_mask, fresh, sequence_ids, signed, *others.values()])


def fill_logprob_diff(
    batch: TrainBatch, rows: FloatArray, others: Sequence[str] = ()
) -> FloatArray:
    """Set `logprob_diff` of the batch's episodes from its `diff_rows` [4 + others, T], which are on the host now.

    `others` [T] each are kept beside the differences of the tokens.

    Returns: the absolute differences of the fresh tokens, [fresh loss tokens].
    """
    rows = rows[:, rows[0] > 0]  # [4 + others, loss tokens]
    rows = rows[:, np.argsort(rows[2], kind="stable")]  # a sequence's traces may lie apart
    _, fresh, sequence_ids, signed, *rest = rows  # [loss tokens] each
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
    return np.abs(signed[is_fresh])  # [fresh loss tokens]


def share_logprob_diffs(groups: Sequence[Group[Episode]], *, mine: bool) -> None:
    """Set every episode's `logprob_diff` on every rank, without the tokens' values of other ranks' episodes. Collective.

    Args:
        mine: whether this rank gives its own. Tensor-parallel ranks have the same.
    """
    episodes = flat(groups)
    own: list[tuple[int, LogprobDiff]] = []
    for i, episode in enumerate(episodes):
        if mine and episode.logprob_diff is not None:
            own.append((i, replace(episode.logprob_diff, tokens={})))
    for i, diff in comm.all_gather_lists(own):
        episodes[i].logprob_diff = episodes[i].logprob_diff or diff
