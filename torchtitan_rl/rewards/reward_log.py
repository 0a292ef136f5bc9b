"""What one call of a reward function logs and records."""

import pickle
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.events import Listener
from torchtitan_rl.text import plain
from torchtitan_rl.types import Metric


class RewardLog(Listener):
    """Buffer for the values that one call of a reward function logs about `size` completions, or records.

    It never raises, because logging must not decide about training: after a wrong value it ignores what the call logs.
    """

    def __init__(self, function: str, size: int) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value for each completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self.recorded: list[tuple[str, Metric]] = []
        """(key, value) of `record_metric`, with values that can leave the process"""
        self.error = ""
        """What was wrong; "" if nothing was."""
        self.size = size
        self._function = function

    def record(self, key: str, value: Any, reduction: str, weight: float) -> None:
        """Keep a value for the rank's collector, which refuses those that are none."""
        self.recorded.append(
            (str(plain(key)), Metric(plain(value), plain(reduction), plain(weight)))
        )

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add `values`, for one completion after another, to a column of the sample tables.

        Calls extend the column, as in TRL; a call with a value for every completion sets it.
        """
        if self.error:
            return
        values = _as_list(values)
        if wrong := "no list" if values is None else _unpicklable(values):
            self._drop(f"log_extra({column!r}, ...) with {wrong}. Give a list of values.")
            return
        before = [] if len(values) == self.size else self.extras.get(str(column), [])
        self.extras[str(column)] = before + values

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all calls and ranks."""
        if self.error:
            return
        try:
            self.metrics.append((str(name), float(value)))
        except (TypeError, ValueError):
            self._drop(f"log_metric({name!r}, {value!r}). Give a number.")

    def drop_incomplete(self) -> None:
        """Drop the columns without exactly one value for each completion. Call it at the end."""
        wrong = {
            column: len(values)
            for column, values in self.extras.items()
            if len(values) != self.size
        }
        for column in wrong:
            del self.extras[column]
        self.error = self.error or " ".join(
            f"Reward function {self._function!r} called log_extra({column!r}, ...) with {number} values for {self.size} "
            "completions. Give one value for each completion, None where there is none."
            for column, number in wrong.items()
        )

    def _drop(self, call: str) -> None:
        """Drop all that this call of the function logs, because half of it would mislead."""
        self.extras.clear()
        self.metrics.clear()
        self.error = f"Reward function {self._function!r} called {call}"


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
