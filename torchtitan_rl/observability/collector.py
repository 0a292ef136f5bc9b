"""Where recorded values wait for the step's flush, and how the ranks' collections become one."""

import functools
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from torchtitan_rl.observability.reduce import ACCUMULATORS, Accumulator, Distribution, Reduce
from torchtitan_rl.observability.rows import Row, has_score, plain, plain_row
from torchtitan_rl.observability.select import Selection
from torchtitan_rl.observability.text import utf8

logger = logging.getLogger(__name__)

_PACKAGE = os.path.dirname(__file__)
_MAX_WAITING = 8192
"""Recorded values, and rows of a table, that may wait before they are reduced: memory is bounded between flushes."""


@dataclass(slots=True)
class Series:
    """One key of one step: its reduction, who recorded it first, and its values so far."""

    reduction: Reduce
    site: str
    """file:line of the first call that recorded the key in this process."""
    accumulator: Accumulator
    non_finite: int = 0
    """Values that were NaN or infinite: shown as `key/non_finite`, kept out of the reduction."""


@dataclass(slots=True)
class Collection:
    """All of one step: what a rank sends in its one gather, and what the merge of all ranks is."""

    series: dict[str, Series] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """Of each table the rows that a selection over all ranks may need."""

    def merge(self, other: "Collection", warn: Callable[[str, str], None]) -> None:
        """Takes in a higher rank's collection. `warn(topic, message)` hears of keys with two reductions."""
        for key, theirs in other.series.items():
            ours = self.series.setdefault(key, theirs)
            if ours is theirs:
                continue
            if ours.reduction is not theirs.reduction:
                warn(key, two_reductions(key, ours.reduction, ours.site, theirs.reduction, theirs.site))
                continue
            ours.accumulator.merge(theirs.accumulator.get_state())
            ours.non_finite += theirs.non_finite
        for key, rows in other.tables.items():
            self.tables.setdefault(key, []).extend(rows)

    def values(self) -> dict[str, float]:
        """Every series as one number (a distribution: several, as `key/p50`); none for a key without a finite value."""
        found: dict[str, float] = {}
        for key, series in self.series.items():
            value = series.accumulator.get_value()
            if isinstance(value, dict):
                found.update({f"{key}/{suffix}": number for suffix, number in value.items()})
            elif value is not None:
                found[key] = value
            if series.non_finite:
                found[f"{key}/non_finite"] = float(series.non_finite)
        return found

    def distributions(self) -> dict[str, np.ndarray]:
        """The finite values of each key recorded with Reduce.DISTRIBUTION, or a sample of them."""
        accumulators = {key: series.accumulator for key, series in self.series.items()}
        return {key: a.get_state()[0] for key, a in accumulators.items() if isinstance(a, Distribution)}


def two_reductions(key: str, first: Reduce, first_site: str, second: Reduce, second_site: str) -> str:
    """The warning for a key recorded in two ways."""
    return (
        f"metric {key!r} is recorded with Reduce.{first.name} at {first_site} and with Reduce.{second.name} at "
        f"{second_site}; Reduce.{first.name} is used. Give one of them another key."
    )


class Collector:
    """Takes values from any thread; `drain` folds what waited into a Collection and starts the next one."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Reduce, Any, float]] = []
        self._collection = Collection()
        self._first_use: dict[str, tuple[Reduce, str]] = {}
        self._warned: set[str] = set()
        self._phase_seconds: Counter[str] = Counter()
        self._seconds = 0.0
        self.rejected = 0
        """Values that were no number (or no row)."""
        self.listeners: list[Callable[[str, Any], None]] = []
        """Called with each key and value at once, for sinks that stream unreduced values."""

    def record(self, key: str, value: Any, reduction: Reduce | str, weight: float) -> None:
        """Keeps one value. Device tensors are copied on the device and read at the flush: no synchronisation here."""
        started = time.perf_counter()
        if not isinstance(key, str):
            raise TypeError(f"expected a key of type str, got {type(key).__name__}")
        key, reduction = utf8(key), Reduce(reduction)
        first, site = self._first_use.get(key) or self._first_use.setdefault(key, (reduction, call_site()))
        if first is not reduction:
            self.warn(key, two_reductions(key, first, site, reduction, call_site()))
            if Reduce.TABLE in (first, reduction):
                self.rejected += 1
                return
        value = _rows(value) if first is Reduce.TABLE else _numbers(value, first)
        with self._lock:
            self._waiting.append((key, first, value, weight))
            if len(self._waiting) > _MAX_WAITING:
                self._fold()
            self._seconds += time.perf_counter() - started
        for listener in self.listeners:
            listener(key, value)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Adds to this rank's `time/{phase}`; ranks merge by maximum, because the slowest is what a step waits for."""
        with self._lock:
            self._phase_seconds[phase] += seconds

    def elapsed(self, phase: str) -> float:
        """This rank's seconds in `phase` since the last drain."""
        with self._lock:
            return self._phase_seconds[phase]

    def drain(self) -> tuple[Collection, float]:
        """This rank's collection since the last drain, and the seconds that recording it took."""
        with self._lock:
            for phase, seconds in _with_unaccounted(self._phase_seconds).items():
                key = f"time/{phase}"
                self._first_use.setdefault(key, (Reduce.MAX, f"timed({phase!r})"))
                self._waiting.append((key, self._first_use[key][0], seconds, 1.0))
            self._phase_seconds.clear()
            self._fold()
            collection, self._collection = self._collection, Collection()
            seconds, self._seconds = self._seconds, 0.0
        collection.tables = {key: self._selection.candidates(rows) for key, rows in collection.tables.items()}
        return collection, seconds

    def warn(self, topic: str, message: str) -> None:
        """Logs `message` once for each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)

    def reject(self, key: object, what: str, error: Exception) -> None:
        """Counts a value that cannot be recorded, and warns once for its key."""
        self.rejected += 1
        self.warn(f"{key} value", f"metric {key!r}: dropped a value of type {what}: {plain(error)}")

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        for key, reduction, value, weight in waiting:
            try:
                self._fold_rows(key, value) if reduction is Reduce.TABLE else self._fold_one(
                    key, reduction, value, weight
                )
            except Exception as error:
                self.reject(key, type(value).__name__, error)

    def _fold_rows(self, key: str, rows: list[Row]) -> None:
        table = self._collection.tables.setdefault(key, [])
        table += map(plain_row, rows)
        if not all(map(has_score, rows)):
            self.warn(f"{key} score", f"table {key!r}: rows without a column 'score' (or 'reward') are ranked last")
        if len(table) > _MAX_WAITING:
            self._collection.tables[key] = self._selection.candidates(table)

    def _fold_one(self, key: str, reduction: Reduce, value: Any, weight: Any) -> None:
        series = self._collection.series.get(key)
        if series is None:
            site = self._first_use[key][1]
            series = self._collection.series[key] = Series(reduction, site, ACCUMULATORS[reduction]())
        if reduction is Reduce.DISTRIBUTION:
            values = value.double().cpu().numpy() if isinstance(value, Tensor) else value  # [n]
            finite = np.isfinite(values)
            if not finite.all():
                series.non_finite += len(values) - int(np.count_nonzero(finite))
                values = values[finite]
            series.accumulator.append(values, 1.0)
        elif math.isfinite(number := float(value)) and math.isfinite(weight := float(weight)):
            series.accumulator.append(number, weight)
        else:
            series.non_finite += 1


def call_site() -> str:
    """file:line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _PACKAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _with_unaccounted(seconds: Mapping[str, float]) -> dict[str, float]:
    """This rank's phases and what of its "step" none of them holds: "train/forward" is a part of its phase."""
    if "step" not in seconds:
        return dict(seconds)
    accounted = sum(value for phase, value in seconds.items() if phase != "step" and "/" not in phase)
    return {**seconds, "unaccounted": max(0.0, seconds["step"] - accounted)}


def _numbers(value: Any, reduction: Reduce) -> float | np.ndarray | Tensor:
    """A number, or for a distribution a float64 copy [n]; a device tensor is copied on its device."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.device.type != "cpu":
            _check_shape(value, reduction)
            return value.reshape(-1).clone() if reduction is Reduce.DISTRIBUTION else value.reshape(()).clone()
        value = value.double().numpy()
    values = np.array(value, dtype=np.float64) if reduction is Reduce.DISTRIBUTION else value
    if isinstance(values, np.ndarray):
        _check_shape(values, reduction)
    return values.reshape(-1) if reduction is Reduce.DISTRIBUTION else float(values)


def _check_shape(values: np.ndarray | Tensor, reduction: Reduce) -> None:
    one_number = values.shape in ((), (1,))
    if not (one_number or reduction is Reduce.DISTRIBUTION and values.ndim == 1):
        most = "one dimension" if reduction is Reduce.DISTRIBUTION else "a number or a 0-d tensor"
        raise ValueError(f"expected {most}, got shape {tuple(values.shape)}")


def _rows(value: Any) -> list[Row]:
    rows = value if isinstance(value, (list, tuple)) else [value]
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"expected a dict or a list of dicts, got {type(row).__name__}")
    return [dict(row) for row in rows]


_active: Collector | None = None
"""What `record_metric` feeds: a global, so that any function may record without being handed a recorder."""


def activate(collector: Collector | None) -> None:
    """Makes `collector` the one that `record_metric` feeds; None: recording is dropped with one warning."""
    global _active
    _active = collector


def active() -> Collector | None:
    """The collector that `record_metric` feeds now."""
    return _active


@functools.cache
def _warn_inactive() -> None:
    logger.warning("metrics recorded from here on are dropped: no Recorder is running, or metrics are off")


def record_metric(key: str, value: Any, reduction: Reduce | str = Reduce.MEAN, weight: float = 1.0) -> None:
    """Records a value under `key` for this step's flush; on any rank, in any thread; never communicates or raises.

    Args:
        key: such as "reward/mean".
        value: a number or a 0-d tensor; for Reduce.DISTRIBUTION also a list or a 1-D tensor of numbers; for
            Reduce.TABLE a dict or a list of dicts, each one row.
        reduction: how values of the key are merged over calls and ranks; one key has one reduction.
        weight: of a mean or a standard deviation: how many units (tokens, sequences) the value stands for.

    What every rank knows alike, every rank records with Reduce.LAST; of a distribution or a table each rank records its
    own share. Values recorded before a Recorder exists, or with metrics off, are dropped with one warning; so are
    values that are no number.
    """
    collector = _active
    if collector is None:
        _warn_inactive()
        return
    try:
        collector.record(key, value, reduction, weight)
    except Exception as error:
        collector.reject(plain(key), f"{type(value).__name__} at {call_site()}", error)


def record_metrics(metrics: Mapping[str, Any]) -> None:
    """Records each `types.Metric` under its key."""
    for key, metric in metrics.items():
        record_metric(key, metric.value, metric.reduction, metric.weight)
