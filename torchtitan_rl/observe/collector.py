"""Holds recorded values until the step's flush, and merges the collections of all ranks."""

import fnmatch
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.comm import is_rank_0
from torchtitan_rl.device import ON_CPU
from torchtitan_rl.events import Kind, Listener
from torchtitan_rl.observe.cell_text import utf8
from torchtitan_rl.observe.reduce import Distribution, Reduce, Series, series_of
from torchtitan_rl.observe.sample_rows import Row, plain, plain_row
from torchtitan_rl.observe.select import Selection

logger = logging.getLogger(__name__)

_MAX_WAITING = 8192
"""Recorded values, or rows of a table, that may wait before they are reduced. It bounds memory between flushes."""


@dataclass(slots=True)
class Collection:
    """Everything recorded in one step, by one rank (which sends it in a single gather) or merged over all ranks."""

    series: dict[str, Series] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """For each table, the rows that a selection over all ranks may need."""

    def merge(self, other: "Collection", warn: Callable[[str, str], None]) -> None:
        """Merges a higher rank's collection. Calls `warn(topic, message)` for a key with two reductions."""
        for key, theirs in other.series.items():
            ours = self.series.setdefault(key, theirs)
            if ours.reduction is not theirs.reduction:
                warn(key, _two_reductions(key, ours.reduction, theirs.reduction))
            elif ours is not theirs:
                ours.merge(theirs)
        for key, rows in other.tables.items():
            self.tables.setdefault(key, []).extend(rows)

    def state_dict(self) -> dict[str, Any]:
        """Returns the plain values and arrays that `of_state` restores."""
        series = {key: (one.reduction.value, one.state_dict()) for key, one in self.series.items()}
        return {"series": series, "tables": self.tables}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Collection":
        collection = cls(tables=state["tables"])
        for key, (reduction, values) in state["series"].items():
            collection.series[key] = series_of(Reduce(reduction))
            vars(collection.series[key]).update(values)
        return collection

    def values(self) -> dict[str, float]:
        """One number per key (several for a distribution, such as `key/p50`). Keys without a finite value are absent."""
        return {
            name: value
            for key, series in self.series.items()
            for name, value in series.values(key).items()
        }

    def distributions(self) -> dict[str, np.ndarray]:
        """The finite values of each key recorded with Reduce.DISTRIBUTION, or a sample of them: float64 [n], n > 0."""
        return {
            key: series.numbers
            for key, series in self.series.items()
            if isinstance(series, Distribution) and len(series.numbers)
        }


class Collector(Listener):
    """Keeps what this rank records, from any thread. `drain` reduces it to a Collection and starts the next one."""

    def __init__(self, selection: Selection, leave_out_columns: Sequence[str] = ()) -> None:
        """`leave_out_columns`: patterns of the columns that no table holds."""
        self._selection = selection
        self._leaves_out = functools.cache(
            lambda column: any(fnmatch.fnmatch(column, pattern) for pattern in leave_out_columns)
        )
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Reduce, Any, float]] = []
        self._collection = Collection()
        self._first_use: dict[str, Reduce] = {}
        self._warned: set[str] = set()
        self._phase_seconds: Counter[str] = Counter()
        self._peak_bytes = 0
        self.rejected = 0
        """Count of values that were not a number (or not a row)."""

    def record(
        self, key: str, value: Any, reduction: Reduce | str = Reduce.MEAN, weight: float = 1.0
    ) -> None:
        """Stores one value; never raises. A device tensor is copied on its device and read at the flush."""
        try:
            first = self._first_use.get(key)
            if first is not reduction:
                key, first = self._admit(key, Reduce(reduction))
            if first is Reduce.TABLE:
                value = self.plain_rows(value)
            else:
                value = _as_recorded(value, first)
            with self._lock:
                self._waiting.append((key, first, value, weight))
                if len(self._waiting) > _MAX_WAITING:
                    self._fold()
        except Exception as error:
            self._reject(plain(key), type(value).__name__, error)

    @contextmanager
    def during(self, kind: Kind, name: str) -> Iterator[None]:
        """Adds the seconds of a timed context to this rank's `time/{name}`, and notes the memory in use at its end.

        A step waits for the slowest rank: ranks merge by maximum.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            if kind in ("timed", "waiting"):
                used = used_memory_bytes()
                with self._lock:
                    self._phase_seconds[name] += time.perf_counter() - started
                    self._peak_bytes = max(self._peak_bytes, used)

    def elapsed(self, name: str) -> float:
        """This rank's seconds in `timed(name)` since the last drain; if it has none, those that `add` has brought."""
        with self._lock:
            added = self._collection.series.get(f"time/{name}")
            brought = added.values(name).get(name, 0.0) if added else 0.0
            return self._phase_seconds[name] or brought

    def add(self, recorded: dict[str, Any]) -> None:
        """Add the `state_dict` of what a rank of generators has recorded. Every trainer gets it: rank 0 counts it, the others take the
        seconds for their shares of a step."""
        other = Collection.of_state(recorded)
        if not is_rank_0():
            seconds = {key: one for key, one in other.series.items() if key.startswith("time/")}
            other = Collection(seconds)
        with self._lock:
            self._fold()
            self._collection.merge(other, self.warn)

    def drain(self) -> Collection:
        """Returns this rank's collection since the last drain."""
        with self._lock:
            phases, self._phase_seconds = self._phase_seconds, Counter()
            peak_bytes, self._peak_bytes = self._peak_bytes, 0
        if "step" in phases:
            self.record("perf/peak_memory_gib", peak_bytes / 2**30, Reduce.MAX)
        for phase, seconds in phases.items():
            self.record(f"time/{phase}", seconds, Reduce.MAX)
        with self._lock:
            self._fold()
            collection, self._collection = self._collection, Collection()
        tables = collection.tables
        collection.tables = {key: self._selection.select(rows) for key, rows in tables.items()}
        return collection

    def warn(self, topic: str, message: str) -> None:
        """Logs `message` once for each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)

    def _reject(self, key: object, what: str, error: Exception) -> None:
        self.rejected += 1
        self.warn(f"{key} value", f"metric {key!r}: dropped a value of type {what}: {plain(error)}")

    def _admit(self, key: str, reduction: Reduce) -> tuple[str, Reduce]:
        """The key as stored, and the reduction of its first use. Warns if `reduction` differs from that."""
        if not isinstance(key, str):
            raise TypeError(f"expected a key of type str, got {type(key).__name__}")
        if key in ("step", "time"):
            raise ValueError("each line of the files has this key of its own; use another name")
        key = utf8(key)
        first = self._first_use.setdefault(key, reduction)
        if first is not reduction:
            self.warn(key, _two_reductions(key, first, reduction))
        return key, first

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        series = self._collection.series
        for key, reduction, value, weight in waiting:
            try:
                if reduction is Reduce.TABLE:
                    self._fold_rows(key, value)
                    continue
                if key not in series:
                    series[key] = series_of(reduction)
                series[key].append(value, weight)
            except Exception as error:
                self._reject(key, type(value).__name__, error)

    def plain_rows(self, value: Any) -> list[Row]:
        """Copies of the rows with plain cells. Later changes of the originals do not affect them."""
        rows = value if isinstance(value, (list, tuple)) else [value]
        if others := {type(row).__name__ for row in rows if not isinstance(row, dict)}:
            raise ValueError(f"expected a dict or a list of dicts, got {', '.join(sorted(others))}")
        return [
            {name: cell for name, cell in plain_row(row).items() if not self._leaves_out(name)}
            for row in rows
        ]

    def _fold_rows(self, key: str, rows: list[Row]) -> None:
        table = self._collection.tables.setdefault(key, [])
        table += rows
        if len(table) > _MAX_WAITING:
            self._collection.tables[key] = self._selection.select(table)


def _as_recorded(value: Any, reduction: Reduce) -> Any:
    """The value as stored: a float; a float64 copy [n] for a distribution.

    A device tensor is copied on its device, because reading it now would wait for the device.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        value = value.double().numpy() if value.device.type == "cpu" else value.clone()
    if reduction is Reduce.DISTRIBUTION:
        if not isinstance(value, Tensor):
            value = np.array(value, dtype=np.float64)
        if value.ndim > 1:
            raise ValueError(f"expected one dimension, got shape {tuple(value.shape)}")
        return value.reshape(-1)  # [n]
    if isinstance(value, Tensor):
        return value
    return float(value.item() if hasattr(value, "item") else value)


def _two_reductions(key: str, first: Reduce, second: Reduce) -> str:
    return (
        f"metric {key!r} is recorded with Reduce.{first.name} and with Reduce.{second.name}; "
        f"Reduce.{first.name} is used. Give one of them another key."
    )


def used_memory_bytes() -> int:
    """Bytes in use now: on this rank's GPU by anyone, or this process's resident set without one.

    At the end of a phase it is the phase's peak: PyTorch's allocator keeps what a phase took until the engine wakes. PyTorch's
    own peak counts the engine's memory also while it sleeps and that memory is given back.
    """
    if ON_CPU:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after an error on the GPU, which is the one to raise
        return 0
    return total - free
