"""Logging of reward functions: a buffer for each call, and the metrics of a step."""

import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.core.types import Metric


class LogError(ValueError):
    """A reward function logged an invalid value. Its logging is dropped, its scores are kept."""


class RewardLog:
    """Buffer for the values that one call of a reward function logs about one prompt's group."""

    def __init__(self, function: str, group_size: int) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value for each completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self._function = function
        self._group_size = group_size
        self._closed = False

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add `values`, one for each completion in order, as a column of the sample tables. A second call replaces the first.

        Raises LogError and drops all columns if the number of values is wrong or they cannot be pickled.
        """
        values = _as_list(values)
        wrong = "no list" if values is None else f"{len(values)} values" * (len(values) != self._group_size)
        if wrong := wrong or _unpicklable(values):
            self.extras.clear()
            raise self._closed_by(
                f"log_extra({column!r}, ...) with {wrong} for {self._group_size} completions. Give one value for each "
                "completion, None where there is none."
            )
        if not self._closed:
            self.extras[str(column)] = values

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all groups and ranks. Raises LogError if it is not a number."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise self._closed_by(f"log_metric({name!r}, {value!r}). Give a number.") from error
        if not self._closed:
            self.metrics.append((str(name), number))

    def _closed_by(self, call: str) -> LogError:
        """Ignore all later logging of this call, because half of it would mislead."""
        self._closed = True
        return LogError(f"Reward function {self._function!r} called {call}")


class RewardMetrics:
    """Sums and weighted means since the last drain. The metrics' listener merges them over ranks."""

    def __init__(self) -> None:
        self._means: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._sums: dict[str, float] = defaultdict(float)

    def add_logged(self, function: str, metrics: Sequence[tuple[str, float]], num_completions: int) -> None:
        """Add the values that `function` logged about one group. Each name has the weight `num_completions` in total."""
        times = Counter(name for name, _ in metrics)
        for name, value in metrics:
            if math.isfinite(value):
                self._means[f"extra/{function}/{name}"].append((value, num_completions / times[name]))
            else:
                self._sums[f"extra/{function}/{name}/non_finite"] += 1

    def add_call(self, function: str, seconds: float, num_failed: int) -> None:
        """Add the duration of one call and the number of completions that it failed to score."""
        self._means[f"reward/{function}/seconds"].append((seconds, 1.0))
        if num_failed:
            self._sums[f"reward/{function}/failures"] += num_failed

    def drain(self) -> dict[str, Metric]:
        """Returns the means `extra/<function>/<name>` and `reward/<function>/seconds`, and the sums
        `extra/<function>/<name>/non_finite` and `reward/<function>/failures`."""
        drained = {}
        for key, entries in self._means.items():
            weight = sum(weight for _, weight in entries)
            drained[key] = Metric(value=sum(value * weight for value, weight in entries) / weight, weight=weight)
        drained |= {key: Metric(value=value, reduction="sum") for key, value in self._sums.items()}
        self._means.clear()
        self._sums.clear()
        return drained


def _as_list(values: Any) -> list[Any] | None:
    """Returns `values` as a list, with tensors and arrays as Python numbers; None if they are not a sequence."""
    if isinstance(values, (str, bytes, dict)):
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if hasattr(values, "__iter__") else None


def _unpicklable(values: list[Any]) -> str:
    """Returns the reason why the values cannot be sent from a worker process; "" if they can."""
    try:
        pickle.dumps(values)
    except Exception as error:
        return f"values that cannot be pickled ({error})"
    return ""
