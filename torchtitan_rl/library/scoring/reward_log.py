"""Logging of reward functions: a buffer for each call."""

import pickle
from collections.abc import Sequence
from typing import Any


class LogError(ValueError):
    """A reward function logged an invalid value. Its logging is dropped, its scores are kept."""


class RewardLog:
    """Buffer for the values that one call of a reward function logs about `size` completions."""

    def __init__(self, function: str, size: int, *, closed: bool = False) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value for each completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self._function = function
        self._size = size
        self._closed = closed

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add `values`, for one completion after another, to a column of the sample tables.

        Calls extend the column, as in TRL; a call with a value for every completion sets it. Raises LogError and drops all
        columns if `values` is no list or cannot be pickled.
        """
        if self._closed:
            return
        values = _as_list(values)
        if wrong := "no list" if values is None else _unpicklable(values):
            self.extras.clear()
            raise self._closed_by(f"log_extra({column!r}, ...) with {wrong}. Give a list of values.")
        before = [] if len(values) == self._size else self.extras.get(str(column), [])
        self.extras[str(column)] = before + values

    def drop_incomplete(self) -> str:
        """Drops the columns without exactly one value for each completion. Returns what was wrong; "" if nothing was."""
        wrong = {column: len(values) for column, values in self.extras.items() if len(values) != self._size}
        for column in wrong:
            del self.extras[column]
        return " ".join(
            f"Reward function {self._function!r} called log_extra({column!r}, ...) with {number} values for {self._size} "
            "completions. Give one value for each completion, None where there is none."
            for column, number in wrong.items()
        )

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all calls and ranks. Raises LogError if it is not a number."""
        if self._closed:
            return
        try:
            self.metrics.append((str(name), float(value)))
        except (TypeError, ValueError) as error:
            raise self._closed_by(f"log_metric({name!r}, {value!r}). Give a number.") from error

    def _closed_by(self, call: str) -> LogError:
        """Ignore all later logging of this call, because half of it would mislead."""
        self._closed = True
        return LogError(f"Reward function {self._function!r} called {call}")


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
