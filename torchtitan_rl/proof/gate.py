"""The gate stops training if trainer and sampler disagree on the log-probabilities of the sampled tokens."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_rl.core.device import DEVICE_TYPE
from torchtitan_rl.core.errors import SamplerFault
from torchtitan_rl.core.trainer.trainer_config import LogprobGateConfig
from torchtitan_rl.core.types import FloatArray

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


class LogprobGate:
    """Checks a batch's differences before its first update.

    By default it compares them with the run's earlier steps, so no limit for a dtype or a model is needed. Checkpoints
    hold what it knows of them.
    """

    def __init__(self, config: LogprobGateConfig, *, dtypes: set[str]) -> None:
        """`dtypes`: those in which the trainer and the engine compute."""
        self.config = config
        self._dtype = "float32" if dtypes == {"float32"} else "bfloat16"
        self._before: dict[str, deque[float]] = {name: deque(maxlen=HISTORY) for name in FLOORS[self._dtype]}

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
        "does not mirror, or other tokens kept by top_p, top_k, min_p or a grammar than were recorded. The update was not applied."
    )
