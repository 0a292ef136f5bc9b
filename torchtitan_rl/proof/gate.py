"""The gate stops training if trainer and sampler disagree on the log-probabilities of the sampled tokens."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
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

CERTAIN = 1e-4
"""In bfloat16 a token's difference counts as |log pi - log mu| / (1 - mu + CERTAIN): about that of its logit.

With noise dz of the logits, d log p = dz - sum of p dz, at most sqrt(2) (1 - p) times as large as the noise. On SmolLM2 the quotient
is 0.07 to 0.10 on average whether 1 - mu is 1 or 1e-6, where the plain difference of a step falls 1,000 times as the policy becomes
certain, and a step with one uncertain prompt could be stopped. In float32 the rounding of the log-probability itself is larger."""

HISTORY, FIRST = 20, 3
GROWTH = {"float32": 20.0, "bfloat16": 10.0}
"""The limit on a step's mean and 99th percentile: GROWTH times their median over the last HISTORY steps, once FIRST
steps are known. This and the next are by the coarser dtype of trainer and engine."""

FLOORS = {
    "float32": {"mean": 5e-6, "p99": 2e-5},
    "bfloat16": {"mean": 2e-2, "p99": 0.2},
}
"""Values up to these never stop training. In float32 a healthy mean is about 4e-7."""

FIRST_LIMITS = {
    "float32": {"mean": 1e-3, "p99": 2e-2},
    "bfloat16": {"mean": math.inf, "p99": math.inf},
}
"""The limits until FIRST steps are known."""

ONE_TOKEN = {"float32": 1e-3, "bfloat16": 1.0}
"""A step in which one token differs by this, and no other, stays below the limit on the mean, however few tokens it
has."""

QUANTILE_TOKENS = 500
"""The 99th percentile of fewer tokens is not checked: it depends on five of them at most."""


class LogprobGateError(SamplerFault):
    """Trainer and sampler disagree on the sampled tokens. Raised before the optimizer step."""


@dataclass
class LogprobDiffs:
    """Distribution of the differences of sampled tokens, as the gate counts them. Adds up over micro-batches and ranks."""

    counts: FloatArray = field(default_factory=lambda: np.zeros(len(EDGES) + 1))  # [bins]
    total: float = 0.0
    largest: float = 0.0
    """The largest |log pi - log mu|; infinite if any is NaN."""

    def add(self, values: FloatArray, scale: FloatArray | float = 1.0) -> None:
        """Add |log pi - log mu| [tokens], divided by `scale` [tokens]. Those that are not finite count only for `largest`."""
        scaled = values / scale  # [tokens]
        finite = scaled[np.isfinite(scaled)]
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
        self._unit = "" if self._dtype == "float32" else f" / (1 - mu + {CERTAIN:g})"
        self._before: dict[str, deque[float]] = {name: deque(maxlen=HISTORY) for name in FLOORS[self._dtype]}

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """Returns the means and 99th percentiles of the last steps under the dtype and the unit in which they were measured."""
        return {self._dtype + self._unit: {name: list(before) for name, before in self._before.items()}}

    def load_state_dict(self, state_dict: dict[str, dict[str, list[float]]]) -> None:
        """Restore what `state_dict` returned. A run that goes on in another dtype begins anew."""
        for name, values in state_dict.get(self._dtype + self._unit, {}).items():
            self._before[name].extend(values)

    def check(self, differences: Sequence[FloatArray]) -> None:
        """Raise LogprobGateError, on every rank, if the step's differences are over a limit. NaN is over `max_diff` alone.

        Args:
            differences: of this rank's tokens, by micro-batch: |log pi - log mu| and log mu, [2, tokens] each.
        """
        mine = LogprobDiffs()
        for values, log_mu in differences:  # [tokens] each
            mine.add(values, 1 - np.exp(np.minimum(log_mu, 0)) + CERTAIN if self._unit else 1.0)
        diffs = mine.merged()
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
                raise _error(name + self._unit, value, bound)
            before.append(value)

    def _limit(self, name: str) -> tuple[float, str]:
        """Returns the limit on the mean or the 99th percentile of the next step, and what it is, for the error."""
        before, floor = self._before[name], FLOORS[self._dtype][name]
        if len(before) < FIRST:
            highest = FIRST_LIMITS[self._dtype][name]
            return highest, f"{highest:g}, the limit in {self._dtype} until {FIRST} steps are known"
        median, growth = statistics.median(before), GROWTH[self._dtype]
        if growth * median < floor:
            known = f"the {len(before)} steps before have a median of {median:.3g}"
            return floor, f"{floor:g}, the floor in {self._dtype} ({known})"
        known = f"{growth:g} x the median {median:.3g} of the {len(before)} steps before"
        return growth * median, known


def _error(which: str, value: float, bound: str) -> LogprobGateError:
    return LogprobGateError(
        f"sampler/logprob_diff/{which} is {value:.3g}, over {bound}: the sampler did not sample from the policy "
        "that is being trained. Likely causes: stale weights, a stale prefix cache, a temperature that the trainer "
        "does not mirror, or other tokens kept by top_p, top_k, min_p or a grammar than were recorded. The update was not applied."
    )
