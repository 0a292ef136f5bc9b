"""What one call of a reward function logs and records."""

import pickle
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.events import Listener
from torchtitan_rl.text import plain
from torchtitan_rl.types import Metric


class RewardLog(Listener):
    """Buffer for the values that one call of a reward function logs about `size` completions, or records.

    It never raises, because logging must not decide about training: a wrong value is dropped.
    """

    def __init__(self, size: int = 0) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value for each completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self.recorded: list[tuple[str, Metric]] = []
        """(key, value) of `record_metric`, with values that can leave the process"""
        self.error = ""
        """The first wrong value, as the call that had it; "" if there was none."""
        self.size = size

    def record(self, key: str, value: Any, reduction: str, weight: float) -> None:
        """Keep a value for the rank's collector, which refuses those that are none."""
        metric = Metric(plain(value), plain(reduction), plain(weight))
        self.recorded.append((str(plain(key)), metric))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add `values`, for one completion after another, to a column of the sample tables.

        Calls extend the column, as in TRL; a call with a value for every completion sets it.
        """
        try:
            values = list(values.tolist() if hasattr(values, "tolist") else values)
            pickle.dumps(values)  # they leave the worker process
        except Exception as error:
            self._drop(f"log_extra({column!r}, ...): {error}")
            return
        before = [] if len(values) == self.size else self.extras.get(str(column), [])
        self.extras[str(column)] = before + values

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all calls and ranks."""
        try:
            self.metrics.append((str(name), float(value)))
        except (TypeError, ValueError) as error:
            self._drop(f"log_metric({name!r}, ...): {error}")

    def drop_incomplete(self) -> None:
        """Drop the columns without exactly one value for each completion. Call it at the end."""
        wrong = [name for name, values in self.extras.items() if len(values) != self.size]
        for column in wrong:
            number = len(self.extras.pop(column))
            self._drop(f"log_extra({column!r}, ...): {number} values for {self.size} completions")

    def _drop(self, call: str) -> None:
        self.error = self.error or call
