"""The recorder: at each step's flush it gathers and merges the ranks' values and passes them to the sinks."""

import atexit
import functools
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl import events
from torchtitan_rl.fields.number import number
from torchtitan_rl.observe.collector import Collection, Collector
from torchtitan_rl.observe.filters import sink_filters
from torchtitan_rl.observe.line_file import LineFile, name_first
from torchtitan_rl.observe.select import Selection
from torchtitan_rl.observe.sink_thread import SinkThread
from torchtitan_rl.observe.sinks import Sink, SinkContext, StepRecord, chosen_sinks
from torchtitan_rl.observe.store import END_OF_BATCH, UNFINISHED_FILE
from torchtitan_rl.observe.tokens import Decode, with_special_tokens, with_written_tokens
from torchtitan_rl.observe.unfinished import UnfinishedStep

logger = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 5.0
"""Time limit of `state_dict` for each file to contain every step so far."""
CLOSE_SECONDS = 30.0
"""Time limit of `close` for the last writes of all sinks together."""
QUEUE_SIZE = 64
"""Steps that may wait for a slow sink."""

Gather = Callable[[object], list[object] | None]


class Recorder(Configurable):
    """Collects the values of `record_metric`; once a step, merges them over ranks and passes them to the sinks.

    It cannot change training: after construction no method raises, and no sink runs on the caller's thread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sinks: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
        """Outputs: console, jsonl, tensorboard, wandb, trackio, or your own class as path/to/file.py:Class. The local store
        (samples.jsonl) is always written."""

        filters: list[str] = field(default_factory=list)
        """Series and tables of a sink, as "sink=pattern,pattern". The last pattern that matches decides: "x" takes, "!x"
        leaves out, "x:10" takes every 10 steps. A list that begins with "!" takes all else. Example: "wandb=!*/samples"."""

        select: list[str] = field(default_factory=lambda: ["top:1", "bottom:1", "random:1"])
        """Selectors for the rows of a sample table to show, as "name:rows". Names: top, bottom, random, longest,
        truncated, failed, unscored, zero_variance, group_best, group_worst. "pinned:TEXT" selects the rows whose prompt
        contains TEXT."""

        leave_out_columns: list[str] = field(default_factory=list)
        """Patterns of columns to leave out of all sample tables, such as "messages" or "example/*"."""

        keep_all_rows: bool = False
        """Store every row of every step in samples.jsonl, not only the selected rows and those of the greedy evaluation."""

        store_bytes: int = number(2 * 1024**3, least=0)
        """Size limit of samples.jsonl, bytes. Later rows are dropped, with a warning."""

        report: bool = True
        """Write report.html, a page of metrics and samples, into the run folder at the end (docs/report.md)."""

        console_every: int = number(10, least=0, remedy="0 shows no panels.")
        """Steps between panels of metrics and samples on the console; 0: never."""

        console_metrics: list[str] = field(default_factory=list)
        """Patterns of further metrics for the console's panel, such as "loss/*"."""

        project: str = ""
        """Project name on W&B and Trackio. Empty: torchtitan_rl, or on W&B what WANDB_PROJECT says."""

        max_traces_per_step: int = number(16, least=0, remedy="0 logs none.")
        """Stored rollouts of each split to log to Trackio as traces in a step, the selected ones first; 0: none."""

    def __init__(
        self,
        config: Config,
        *,
        run_folder: Path,
        run_name: str,
        run_config: dict[str, Any],
        total_steps: int,
        rank: int = 0,
        gather: Gather | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Starts the sinks' threads on rank 0, and listens to `record_metric` and `timed`.

        Args:
            gather: takes this rank's object; returns all ranks' objects, in rank order, on rank 0 and None elsewhere.
                Called exactly once per flush on every rank. None: there is only one process.
            decode: converts token ids to text, with special tokens. None: the tokens of samples are not stored.

        Raises: UserError, on every rank, for an invalid sink, filter or selector; OSError, on rank 0, if the run folder
        cannot be written.
        """
        self.config = config
        self._rank = rank
        self._gather = gather
        self._decode = decode
        self._run_folder = run_folder
        self._closed = False
        self._failed: set[str] = set()
        classes = chosen_sinks(config.sinks)
        self._filters = sink_filters(config.filters, classes)
        complete = functools.partial(with_special_tokens, decode=decode)
        self._selection = Selection(config.select, config.keep_all_rows, complete)
        self.collector = Collector(self._selection, config.leave_out_columns)
        self._rewinds = {name: sink.rewind is not Sink.rewind for name, sink in classes.items()}
        self.sinks: dict[str, SinkThread] = {}
        """The running sinks by name, on rank 0."""
        if rank == 0:
            context = SinkContext(
                config=config,
                run_folder=run_folder,
                run_id=_run_id(run_folder),
                run_name=run_name,
                run_config=run_config,
                total_steps=total_steps,
                decode=decode,
            )
            for name, sink in classes.items():
                takes = self._filters[name].takes
                build = functools.partial(sink, replace(context, takes=takes))
                self.sinks[name] = SinkThread(name, build, QUEUE_SIZE)
        self._stop_listening = events.listen(self.collector)
        atexit.register(self.close)

    def flush(self, step: int) -> dict[str, float]:
        """Ends a step: merges all ranks' values, selects rows and passes both to the sinks. Call it once a step.

        Returns: the merged numbers on rank 0, {} elsewhere. Never raises; an internal error loses this step's metrics.
        """
        collection = self.drain()
        gathered = [collection]
        if self._gather is not None:
            gathered = self._or_after_error("gathering", gathered, self._gather, collection)
        if gathered is None or self._rank != 0:
            return {}
        return self._or_after_error("merging", {}, self._write, step, gathered)

    def drain(self) -> Collection:
        """Returns what this rank has recorded since the last call. Never raises."""
        return self._or_after_error("collecting", Collection(), self.collector.drain)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run cuts the files where it goes on. First waits, at most 5 s for each sink that can
        rewind, until all steps are in it."""
        for name, sink in self.sinks.items():
            if self._rewinds[name] and not sink.drain(CHECKPOINT_SECONDS):
                logger.warning(f"sink {name}: steps before this checkpoint are not all written")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: at its first step a sink removes that step and later ones."""

    def write_unfinished(self, step: UnfinishedStep) -> None:
        """Writes the samples of a step that is never flushed, because the run fails. Never raises.

        Of several failing ranks, the first one writes: it has the samples that made it fail.
        """
        self._or_after_error("writing a failed step's samples", None, self._write_first, step)

    def close(self) -> None:
        """Finishes the waiting writes, in at most 30 s for all sinks, and closes the sinks.

        May be called twice; also called at exit.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._stop_listening()
        deadline = time.monotonic() + CLOSE_SECONDS
        for sink_thread in self.sinks.values():
            sink_thread.finish()
        for sink_thread in self.sinks.values():
            sink_thread.join(max(0.0, deadline - time.monotonic()))

    def _write(self, step: int, collections: list[Collection]) -> dict[str, float]:
        """Merges the ranks' collections, passes the step to the sinks, and returns the step's values."""
        collection, *others = collections
        for other in others:
            collection.merge(other, self.collector.warn)
        stored = {
            key: [{**row, "step": step} for row in self._selection.select(rows)]
            for key, rows in collection.tables.items()
        }
        sinks = self.sinks.values()
        values = collection.values()
        values["obs/dropped_rows"] = float(sum(sink_thread.dropped_rows for sink_thread in sinks))
        values["obs/sink_errors"] = float(sum(sink_thread.disabled for sink_thread in sinks))
        values["obs/rejected_values"] = float(self.collector.rejected)
        record = StepRecord(
            step=step,
            time_s=time.time(),
            values=values,
            stored=stored,
            distributions=collection.distributions(),
        )
        for name, sink_thread in self.sinks.items():
            sink_thread.submit(self._filters[name].part(record))
        return dict(values)

    def _write_first(self, step: UnfinishedStep) -> None:
        """Writes the rows of a step that failed, unless another rank has written its own."""
        rows, target = step.rows(self._decode), self._run_folder / UNFINISHED_FILE
        if not rows or target.exists():
            return
        path = target.with_name(f".{UNFINISHED_FILE}.{os.getpid()}")
        file, run_id = LineFile(path, END_OF_BATCH), _run_id(self._run_folder)
        for row, cells in zip(rows, self.collector.plain_rows(rows), strict=True):
            # Step 0: a filter that takes every n-th step takes a step that failed.
            takes = self._filters["local"].takes(row["table"], 0)
            if takes and file.size < self.config.store_bytes:
                cells = with_written_tokens(cells, self._decode)
                origin = {"table": row["table"], "unfinished": True, "run_id": run_id}
                file.append(row["step"], [cells | origin])
        file.close()
        name_first(path, target)

    def _or_after_error(
        self, doing: str, otherwise: Any, call: Callable[..., Any], *values: Any
    ) -> Any:
        """Returns what `call(*values)` returns, or `otherwise` after an error. The first error is logged with its traceback."""
        try:
            return call(*values)
        except Exception:
            self.collector.rejected += 1
            if doing not in self._failed:
                self._failed.add(doing)
                effect = "this step's metrics are incomplete; training continues"
                logger.exception(f"metrics: {doing} failed; {effect}")
            return otherwise


def _run_id(run_folder: Path) -> str:
    """The run's id, eight hex digits, which rank 0 creates and stores in the run folder."""
    path = run_folder / "run_id"
    if not path.exists() or not path.stat().st_size:  # empty: the disk was full
        run_folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text(errors="replace").strip()
