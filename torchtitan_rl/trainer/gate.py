"""The gate stops training if trainer and sampler disagree on the log-probabilities of the sampled tokens."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.errors import SamplerFault
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig
from torchtitan_rl.types import FloatArray

EDGES = np.logspace(-8, 2, 101)
"""Edges of the histogram's bins. A quantile read from it is at most a quarter too high."""

CERTAIN = 1e-4
"""In bfloat16 a token's difference counts as |log pi - log mu| / (1 - mu + CERTAIN): about that of its logit.

With noise dz of the logits, d log p = dz - sum of p dz, at most sqrt(2) (1 - p) times as large as the noise. On SmolLM2 the quotient
is 0.05 to 0.1 on average whether 1 - mu is 1 or 1e-6, where the plain difference of a step falls 1,000 times as the policy becomes
certain, and a step with one uncertain prompt could be stopped. In float32 the rounding of the log-probability itself is larger."""

CAPS = {
    "float32": {"mean": 1e-3, "p99": 2e-2},
    "bfloat16": {"mean": 1.0, "p75": 0.5, "p99": 20.0},
}
"""A step's mean and quantiles are never allowed above these, from step 1 on. This and the next are by the coarser dtype of trainer and
engine. In healthy steps of SmolLM2 and Gemma 3 in bfloat16 the mean is at most 0.47 and the 75th percentile 0.22: the mean where the
siblings of one prompt share an odd token, of a relative difference of 6.7."""

HISTORY, FIRST = 20, 3
GROWTH = {"float32": 20.0, "bfloat16": 10.0}
"""Nor above GROWTH times their median over the last HISTORY steps, once FIRST steps are known."""

FLOORS = {
    "float32": {"mean": 5e-6, "p99": 2e-5},
    "bfloat16": {"mean": 2e-2, "p75": 2e-2, "p99": 8.0},
}
"""Values up to these never stop training. In float32 a healthy mean is about 4e-7."""

ONE_TOKEN = {"float32": 1e-3, "bfloat16": 1.0}
"""A step in which one token differs by this, and no other, stays below the limit on the mean, however few tokens it
has."""

QUANTILE_TOKENS = {"p75": 100, "p99": 500}
"""A quantile of fewer tokens is not checked: it depends on a few of them."""

LARGEST_SCALE, SCALE_ERRORS = 0.05, 6.0
"""Largest allowed least-squares slope of log pi - log mu over log pi + entropy, if it is also this many standard errors from 0.

Logits a times as large move a token's log-probability by (a - 1) (log p + entropy) to first order, so the slope is 1 - a: about
1 - 1 / T if the sampler's temperature is T times the trainer's. Independent symmetric rounding errors reach 6 standard errors in one
step of 3e7 at most, however much they differ in size (Hoeffding, 1963)."""


class LogprobGateError(SamplerFault):
    """Trainer and sampler disagree on the sampled tokens. Raised before the optimizer step."""


class ComparedTokens(NamedTuple):
    """Sampled tokens on which trainer and sampler are compared, [tokens] each."""

    diff: FloatArray
    """log pi - log mu."""
    log_mu: FloatArray
    surprise: FloatArray
    """log pi + the entropy of pi."""


@dataclass
class LogprobDiffs:
    """Distribution of the differences of sampled tokens, as the gate counts them. Adds up over micro-batches and ranks."""

    counts: FloatArray = field(default_factory=lambda: np.zeros(len(EDGES) + 1))  # [bins]
    total: float = 0.0
    largest: float = 0.0
    """The largest |log pi - log mu|; infinite if any is NaN."""
    moments: FloatArray = field(default_factory=lambda: np.zeros(3))
    """[3] sums of x^2, d x and (d x)^2, where d = log pi - log mu and x = log pi + entropy."""

    def add(
        self, diff: FloatArray, scale: FloatArray | float = 1.0, surprise: FloatArray | float = 0.0
    ) -> None:
        """Add tokens. Those with a difference that is not finite count only for `largest`.

        Args:
            diff: log pi - log mu, [tokens].
            scale: what its size is divided by, [tokens].
            surprise: log pi + the entropy of pi, [tokens].
        """
        size = np.abs(diff)  # [tokens]
        finite = np.isfinite(size)  # [tokens]
        scaled = (size / scale)[finite]
        bins = np.searchsorted(EDGES, scaled)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.total += float(scaled.sum(dtype=np.float64))
        if np.isnan(size).any():
            self.largest = math.inf
        else:
            self.largest = max(self.largest, float(size.max(initial=0.0)))
        d = diff[finite].astype(np.float64)
        x = np.broadcast_to(surprise, diff.shape)[finite].astype(np.float64)
        self.moments += np.array([x @ x, d @ x, (d * x) @ (d * x)])

    def merged(self) -> "LogprobDiffs":
        """Returns the distribution over all ranks, on each of them. Collective."""
        if dist.get_world_size() == 1:
            return self
        sums = [*self.counts, self.total, *self.moments]
        numbers = torch.tensor([*sums, self.largest], dtype=torch.float64).to(DEVICE_TYPE)
        dist.all_reduce(numbers[:-1])  # [bins + 4]
        dist.all_reduce(numbers[-1:], op=dist.ReduceOp.MAX)
        numbers = numbers.cpu().numpy()  # [bins + 5]; one wait of the host for both
        return LogprobDiffs(numbers[:-5], float(numbers[-5]), float(numbers[-1]), numbers[-4:-1])

    def summary(self) -> dict[str, float]:
        """Returns {"mean": ..., "p75": ..., "p99": ...}, or {} without tokens."""
        number = self.counts.sum()
        if not number:
            return {}
        bins = np.searchsorted(self.counts.cumsum(), np.array([0.75, 0.99]) * number)  # [2]
        p75, p99 = EDGES[np.minimum(bins, len(EDGES) - 1)].tolist()  # upper edges
        return {"mean": self.total / number, "p75": p75, "p99": p99}

    def slope(self) -> tuple[float, float]:
        """Returns the least-squares slope of d over x, and the standard error it has if the true slope is 0.

        The error is of the differences themselves (not of the residuals, which are 0 where one token is most of the sum).
        """
        xx, dx, ddxx = self.moments.tolist()
        return dx / max(xx, 1e-12), math.sqrt(ddxx) / max(xx, 1e-12)


class LogprobGate:
    """Checks a batch's differences before its first update: with limits that no healthy step reaches, and with the run's earlier steps.

    Checkpoints hold what it knows of these.
    """

    def __init__(self, config: LogprobGateConfig, *, dtypes: set[str]) -> None:
        """`dtypes`: those in which the trainer and the engine compute."""
        self.config = config
        self._dtype = "float32" if dtypes == {"float32"} else "bfloat16"
        self._unit = "" if self._dtype == "float32" else f" / (1 - mu + {CERTAIN:g})"
        self._before: dict[str, deque[float]] = {
            name: deque(maxlen=HISTORY) for name in FLOORS[self._dtype]
        }

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """Returns the means and quantiles of the last steps under the dtype and the unit in which they were measured."""
        return {
            self._dtype + self._unit: {name: list(before) for name, before in self._before.items()}
        }

    def load_state_dict(self, state_dict: dict[str, dict[str, list[float]]]) -> None:
        """Restore what `state_dict` returned. A run that goes on in another dtype begins anew."""
        for name, values in state_dict.get(self._dtype + self._unit, {}).items():
            self._before[name].extend(values)

    def check(self, microbatches: Sequence[ComparedTokens]) -> None:
        """Raise LogprobGateError, on every rank, if the step's differences are over a limit. NaN is over `max_diff` alone.

        Args:
            microbatches: this rank's tokens.
        """
        mine = LogprobDiffs()
        for tokens in microbatches:
            mine.add(tokens.diff, logit_scale(tokens.log_mu, self._dtype), tokens.surprise)
        diffs = mine.merged()
        limit = self.config.max_diff
        scaled = _scaled(diffs)
        if limit is not None and not diffs.largest <= limit:
            raise _error("max", diffs.largest, f"trainer.logprob_gate.max_diff {limit:.3g}", scaled)
        number = diffs.counts.sum()
        for name, value in diffs.summary().items():
            if name not in self._before or number < QUANTILE_TOKENS.get(name, 1):
                continue
            before = self._before[name]
            highest, bound = self._limit(name)
            if name == "mean":
                highest += ONE_TOKEN[self._dtype] / number
            if self.config.distribution and value > highest:
                raise _error(name + self._unit, value, bound, scaled)
            before.append(value)
        if self.config.distribution and scaled:
            raise _error("slope", diffs.slope()[0], f"{LARGEST_SCALE:g}", scaled)

    def _limit(self, name: str) -> tuple[float, str]:
        """Returns the limit on the mean or a quantile of the next step, and what it is, for the error."""
        before, floor, cap = self._before[name], FLOORS[self._dtype][name], CAPS[self._dtype][name]
        known, grown = "", cap
        if len(before) >= FIRST:
            median = statistics.median(before)
            known = f"{GROWTH[self._dtype]:g} x the median {median:.3g} of the {len(before)} steps before"
            grown = GROWTH[self._dtype] * median
        if grown >= cap:
            return cap, f"{cap:g}, the largest that is allowed in {self._dtype}"
        if grown < floor:
            return floor, f"{floor:g}, the floor in {self._dtype} ({known} is less)"
        return grown, known


def logit_scale(log_mu: FloatArray, dtype: str) -> FloatArray | float:
    """Returns what a difference of log-probabilities is divided by, [tokens]: 1 - mu + CERTAIN in bfloat16, 1 in float32.

    Args:
        log_mu: [tokens] log-probabilities; one above 0 by rounding counts as 0.
        dtype: the coarser one of trainer and engine.
    """
    if dtype == "float32":
        return 1.0
    return 1 - np.exp(np.minimum(log_mu, 0)) + CERTAIN


def _scaled(diffs: LogprobDiffs) -> str:
    """Says by how much the sampler seems to multiply the logits; "" within LARGEST_SCALE, or where no such factor explains the slope."""
    slope, error = diffs.slope()
    if not LARGEST_SCALE < abs(slope) < 1 or abs(slope) <= SCALE_ERRORS * error:
        return ""
    return (
        f" log pi - log mu grows by {slope:+.3f} with log pi + entropy ({abs(slope) / error:.0f} standard errors), as if the sampler "
        f"multiplied the logits by {1 - slope:.2f}."
    )


def _error(which: str, value: float, bound: str, scaled: str) -> LogprobGateError:
    return LogprobGateError(
        f"sampler/logprob_diff/{which} is {value:.3g}, over {bound}: the sampler did not sample from the policy "
        f"that is being trained.{scaled} Likely causes: stale weights, a stale prefix cache, a temperature that the trainer "
        "does not mirror, or other tokens kept by top_p, top_k, min_p or a grammar than were recorded. The update was not applied."
    )
