"""The base class of sinks. A sink is a class of about 60 lines that writes the steps passed to it.

A SinkThread of rank 0 runs it. It may block or raise without affecting training.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.select import shown
from torchtitan_rl.observe.tokens import Decode

PROJECT = "torchtitan_rl"
"""The project on W&B and Trackio if nothing names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, in the form the sinks receive.

    Example: StepRecord(step=3, values={"reward/mean": 0.5}, stored={"rollout/samples": [{"step": 3, ...}]}, time_s=...)
    """

    step: int
    time_s: float
    """Unix time of the flush, seconds."""
    values: dict[str, float] = field(default_factory=dict)
    stored: dict[str, list[Row]] = field(default_factory=dict)
    """The rows of each table for the local store: every row with `keep_all_rows`, else the selected rows with their siblings."""
    distributions: dict[str, np.ndarray] = field(default_factory=dict)
    """The values, or a sample of them, of each key recorded with Reduce.DISTRIBUTION; not empty."""

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The selected rows of each table that has some, each with its `select_reason`."""
        return {key: chosen for key, rows in self.stored.items() if (chosen := shown(rows))}

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.tables.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """Facts about the run for every sink."""

    config: Any
    """The Recorder.Config."""
    run_folder: Path
    run_name: str
    run_id: str
    """Eight hex digits, unchanged when the run resumes."""
    run_config: dict[str, Any]
    total_steps: int
    decode: Decode | None = None
    """Converts token ids to text; None: tokens are not stored."""
    takes: Callable[[str, int], bool] = lambda key, step: True
    """Whether the sink gets a series or table in a step (`metrics.filters`). Steps that are written have been filtered."""


class Sink(ABC):
    """Base class of all sinks. A subclass defines `write`, and `rewind` if what it has written can be removed again."""

    requires: str | None = None
    """An optional library that the sink imports."""
    waits_for_disk: bool = False
    """True if a write that raised OSError left nothing behind, so that it can be retried."""

    @classmethod
    def check(cls) -> None:
        """Raises UserError if the sink lacks something, such as a login. Called before the engine starts, where rank 0 will be."""

    def __init__(self, context: SinkContext) -> None:
        self.context = context

    @abstractmethod
    def write(self, record: StepRecord) -> int | None:
        """Writes one step. Returns the number of rows left out, if any. An exception disables only this sink."""

    def rewind(self, step: int) -> None:
        """Removes the output of earlier sessions of this run from `step` on. Called once, before the first write.

        A sink that appends to a file and does not define it has the steps between the checkpoint and the crash twice. For one that does,
        each checkpoint waits until all steps are written, at most 5 s.
        """

    def close(self) -> None:
        """Called once, after the last write."""
