"""What a sink is: a class of about 60 lines that writes the steps it is handed.

It runs on a thread of its own behind a Guard, so it may block and raise: neither reaches training.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchtitan_rl.observability.sample_rows import Row
from torchtitan_rl.observability.tokens import Decode

Mode = Literal["global_reduce", "per_rank_reduce", "per_rank_no_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as the sinks see it.

    Example: StepRecord(step=3, values={"reward/mean": 0.5}, tables={"rollout/samples": [{"step": 3, ...}]}, time_s=...)
    """

    step: int
    time_s: float
    """Unix time of the flush, seconds."""
    values: dict[str, float] = field(default_factory=dict)
    charts: dict[str, float] = field(default_factory=dict)
    """The values that are worth a chart: with `slim`, without constant and duplicate series."""
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """The selected rows of each table that has some, each with its `select_reason`."""
    kept: dict[str, list[Row]] = field(default_factory=dict)
    """The rows for the local store: with `keep_all_rows` every row."""
    traces: list[Row] = field(default_factory=list)
    """Rollouts to be shown as conversations."""
    distributions: dict[str, np.ndarray] = field(default_factory=dict)
    """The values, or a sample of them, of each key recorded with Reduce.DISTRIBUTION; not empty."""

    @property
    def num_rows(self) -> int:
        """Table rows in this record."""
        return sum(len(rows) for rows in self.tables.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """What every sink may know of the run."""

    config: Any
    """The Recorder.Config."""
    mode: Mode
    run_folder: Path
    run_name: str
    run_id: str
    """Eight hex digits, the same over resumptions."""
    run_config: dict[str, Any]
    total_steps: int
    rank: int
    decode: Decode | None = None
    """Token ids as text; None: tokens are not kept."""

    @property
    def suffix(self) -> str:
        """What tells ranks' files apart: empty where rank 0 writes for all."""
        return "" if self.mode == "global_reduce" else f".rank{self.rank}"


class Sink(ABC):
    """Base of all sinks. `write` is the one method that each has to define."""

    modes: tuple[Mode, ...] = ("global_reduce",)
    """The modes it can run in."""
    requires: str | None = None
    """The library it imports, where that is not always installed."""
    waits_for_disk: bool = False
    """Whether a write that ended in an OSError has left nothing behind, and may be tried again."""

    def __init__(self, context: SinkContext) -> None:
        self.context = context

    @abstractmethod
    def write(self, record: StepRecord) -> int | None:
        """Writes one step; returns how many of its rows it left out, if any. An exception disables this sink only."""

    def stream(self, key: str, value: Any, step: int) -> None:
        """Writes one value (or the rows) of `key` as recorded, in order, during `step`."""

    def rewind(self, step: int) -> None:
        """Forgets what earlier sessions of this run wrote of `step` and later."""

    def close(self) -> None:
        """Called once, after the last write."""
