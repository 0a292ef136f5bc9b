"""What reward functions may log: a local buffer for each call, and names that never clash."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.core.types import Metric

logger = logging.getLogger(__name__)


class LogError(ValueError):
    """A reward function logged something that cannot be shown; its logging is dropped, its scores are kept."""


class RewardLog:
    """What one call of one reward function logs about one prompt's group. Local: never communicates."""

    def __init__(self, function: str, group_size: int) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value a completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self._function = function
        self._group_size = group_size
        self._closed = False

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Show `values`, one a completion in order, as a column of the sample tables; a second call replaces the first.

        Raises LogError for a wrong number of values, and drops all columns of this call.
        """
        values = _as_list(values)
        if values is None or len(values) != self._group_size:
            self.extras.clear()
            seen = "no list" if values is None else f"{len(values)} values"
            self._close()
            raise LogError(
                f"Reward function {self._function!r} called log_extra({column!r}, ...) with {seen} for "
                f"{self._group_size} completions. Give one value for each completion, None where there is none."
            )
        if not self._closed:
            self.extras[str(column)] = values

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all calls and ranks. Raises LogError for no number."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            self._close()
            raise LogError(
                f"Reward function {self._function!r} called log_metric({name!r}, {value!r}). Give a number."
            ) from error
        if not self._closed:
            self.metrics.append((str(name), number))

    def _close(self) -> None:
        """Take no more columns: half of what a call logs would mislead."""
        self._closed = True


class LogNames:
    """Names under which logged columns or metrics are shown: as they are, or as `<function>/<name>` where several reward
    functions use one. Said once for each name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._users: dict[str, set[str]] = defaultdict(set)
        self._warned: set[str] = set()

    def register(self, function: str, name: str) -> None:
        """Note that `function` uses `name`, before any of a group's names are asked for."""
        self._users[name].add(function)

    def shown(self, function: str, name: str) -> str:
        """`name` as tables and metrics show it."""
        users = self._users[name]
        if len(users) < 2:
            return name
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                f"The {self._kind} {name!r} of reward functions is logged by {sorted(users)}; it is shown as "
                f"<function>/{name}."
            )
        return f"{function}/{name}"


class MetricSums:
    """Sums and counts of what reward functions logged since the last drain; the recorder merges them over ranks."""

    def __init__(self) -> None:
        self._names = LogNames("metric")
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._failures: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, function: str, metrics: list[tuple[str, float]]) -> None:
        """Count what `function` logged for one group: (name, value), as often as it called `log_metric`."""
        for name, value in metrics:
            self._names.register(function, name)
            entry = self._sums[function, name]
            if math.isfinite(value):
                entry[0] += value
                entry[1] += 1
            else:
                entry[2] += 1

    def add_failures(self, function: str, num_completions: int) -> None:
        self._failures[function] += num_completions

    def add_seconds(self, function: str, seconds: float) -> None:
        """Of one call, for one group."""
        self._seconds[function].append(seconds)

    def drain(self) -> dict[str, Metric]:
        """Means `extra/<name>` with their counts; sums `extra/<name>/non_finite` and `reward/<function>/failures`; the mean
        `reward/<function>/seconds` of a call."""
        drained: dict[str, Metric] = {}
        for (function, name), (total, count, non_finite) in self._sums.items():
            key = f"extra/{self._names.shown(function, name)}"
            if count:
                drained[key] = Metric(value=total / count, weight=count)
            if non_finite:
                drained[f"{key}/non_finite"] = Metric(value=non_finite, reduction="sum")
        for function, failures in self._failures.items():
            drained[f"reward/{function}/failures"] = Metric(value=float(failures), reduction="sum")
        for function, seconds in self._seconds.items():
            drained[f"reward/{function}/seconds"] = Metric(value=sum(seconds) / len(seconds), weight=len(seconds))
        self._seconds.clear()
        self._sums.clear()
        self._failures.clear()
        return drained


def _as_list(values: Any) -> list[Any] | None:
    """`values` as a list (tensors and arrays as Python numbers), None when it is not a sequence of values."""
    if isinstance(values, (str, bytes, dict)):
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if hasattr(values, "__iter__") else None
