"""The step's flush: one gather, one merge, and the records that sinks are handed."""

import atexit
import functools
import logging
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan.config import Configurable

from torchtitan_rl.core.config import number
from torchtitan_rl.observability import collector as collecting
from torchtitan_rl.observability.collector import Collection, Collector
from torchtitan_rl.observability.guard import Guard
from torchtitan_rl.observability.rows import Schema
from torchtitan_rl.observability.select import Selection
from torchtitan_rl.observability.sinks import Mode, Sink, SinkContext, StepRecord, chosen_sinks
from torchtitan_rl.observability.slim import Slim
from torchtitan_rl.observability.tokens import Decode

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long `close` waits for a sink's last writes."""
CHECKPOINT_SECONDS = 5.0
"""How long `state_dict` waits for the files to hold every step so far."""
VALUES_A_STEP = 256
"""A sink that streams is handed values, not steps: so many may wait for each step of `queue_size`."""

CONSOLE_METRICS = (
    "reward/mean", "reward/std", "train/accuracy", "groups/*", "advantage/std", "completions/length/m*",
    "completions/clipped_fraction",
    "diversity/*/macro", "loss/policy", "loss/kl", "policy/entropy", "policy/kl_k3", "ratio/clip_fraction",
    "sampler/logprob_diff/m*", "sampler/corrected_fraction", "maxent/tau", "maxent/beta", "semantic_entropy/mean",
    "optimizer/grad_norm", "optimizer/learning_rate", "time/[!e]*", "time/evaluate", "perf/*", "evaluation/*", "obs/overhead_ms",
)  # fmt: skip
"""Some 35 numbers of a usual step, 40 where it evaluates; with `slim` these always have a chart."""

Gather = Callable[[object], list[object] | None]


class Recorder(Configurable):
    """Collects what `record_metric` is given and, once a step, merges it over ranks and hands it to the sinks.

    Nothing here changes training: after construction no method raises, and no sink runs on the caller's thread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enabled: bool = True
        """Record metrics and sample tables. Also off with the environment variable TORCHTITAN_RL_METRICS=0."""

        sinks: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
        """Where steps are written to: console, jsonl, tensorboard, wandb, trackio; the local store always is.
        A mode may follow, as in "jsonl:per_rank_reduce": global_reduce (the default: one merged value, from rank 0),
        per_rank_reduce (each rank its own), per_rank_no_reduce (each value as it is recorded)."""

        slim: bool = True
        """Leave series out of charts (TensorBoard, W&B, Trackio) while they are constant, or equal to another, for 10
        steps; those of console_metrics stay. metrics.jsonl has every series."""

        select: list[str] = field(default_factory=lambda: ["top:1", "bottom:1", "random:1"])
        """Which rows of a sample table are shown, as "name:rows": top, bottom, random, longest, truncated, failed,
        unscored, zero_variance, group_best, group_worst, and "pinned:TEXT" for every row of prompts holding TEXT."""

        seed: int = number(0, least=0)
        """Of the random selector."""

        keep_all_rows: bool = False
        """Keep every row of every step in the local store, not only the selected ones."""

        store_bytes: int = number(2 * 1024**3, least=0)
        """Size at which the local store stops, saying so."""

        report: bool = True
        """At the end of the run, write report.html into its folder: metrics and samples as one page (docs/report.md)."""

        console_every: int = number(10, least=0, remedy="0 shows no panels.")
        """Steps between the console's panels of metrics and samples; 0: never."""

        console_metrics: list[str] = field(default_factory=lambda: list(CONSOLE_METRICS))
        """Patterns of the metrics in the console's panel."""

        queue_size: int = number(64, least=1, remedy="64 is usual.")
        """Steps that may wait for a slow sink; a step more is dropped for it and counted in obs/dropped_rows."""

        project: str = "torchtitan_rl"
        """The project on W&B and Trackio."""

        wandb_mode: Literal["online", "offline"] = "online"
        """online needs `wandb login`; offline writes to the run folder, for `wandb sync`."""

        max_traces_per_step: int = number(16, least=0, remedy="0 logs none.")
        """Rollouts of each split logged to Trackio as traces, a training step; 0: none."""

        trace_key: str = "rollout/traces"
        """The traces' key on Trackio."""

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
        at_end: Callable[[Path], None] = lambda run_folder: None,
    ) -> None:
        """Starts the sinks' threads and makes this the recorder that `record_metric` feeds.

        Args:
            gather: takes this rank's object and returns every rank's, in rank order, on rank 0 and None elsewhere.
                Called exactly once a flush, on every rank. None: there is one process.
            decode: token ids as text, with special tokens. None: tokens of samples are not kept.
            at_end: called on rank 0 with the run's folder when everything is written, with `report` on.

        Raises: UserError, on every rank alike, for a sink, mode or selector that cannot be; OSError, on the ranks that
        have sinks, for a run folder that cannot be written.
        """
        self.config = config
        self._rank = rank
        self._run_folder = run_folder
        self._decode = decode
        self._at_end = at_end
        self._gather = gather
        self._next_step = 0
        self._closed = False
        self._failed: set[str] = set()
        chosen = chosen_sinks(config.sinks if "local" in config.sinks else [*config.sinks, "local"])
        num_traces = config.max_traces_per_step if "trackio" in chosen else 0
        self._selection = Selection(config.select, config.seed, config.keep_all_rows, num_traces)
        self._collector = Collector(self._selection)
        self._schema = Schema(self._collector.warn)
        self._slim: dict[Mode, Slim] = defaultdict(lambda: Slim(always=config.console_metrics))
        self._guards: dict[str, Guard] = {}
        self._enabled = config.enabled and os.environ.get("TORCHTITAN_RL_METRICS", "1") != "0"
        if self._enabled:
            self._start(chosen, run_folder, run_name=run_name, run_config=run_config, total_steps=total_steps)
        collecting.activate(self._collector if self._enabled else None)
        atexit.register(self.close)

    def flush(self, step: int) -> dict[str, float]:
        """Ends a step: merges all ranks' values, selects rows, hands both to the sinks. Call it once a step.

        Returns: the merged numbers on rank 0, {} elsewhere. Never raises; an error inside costs this step's metrics.
        """
        started = time.perf_counter()
        collection, seconds = self._guarded("collecting", self._collector.drain, (Collection(), 0.0))
        started -= seconds
        if any(guard.mode == "per_rank_reduce" for guard in self._guards.values()):
            self._guarded("reducing", lambda: self._write(step, [collection], "per_rank_reduce", started), {})
        waiting = time.perf_counter()
        gathered: list[Any] | None = [collection]
        if self._gather is not None:
            gathered = self._guarded("gathering", lambda: self._gather(collection), [collection])
        started += time.perf_counter() - waiting
        values: dict[str, float] = {}
        if self._enabled and gathered is not None and self._rank == 0:
            values = self._guarded("merging", lambda: self._write(step, gathered, "global_reduce", started), {})
        self._next_step = step + 1
        return values

    def state_dict(self) -> dict[str, Any]:
        """Where the sinks stand, for the checkpoint; first waits up to 5 s until files hold every step so far."""
        for name in ("jsonl", "local"):
            if name in self._guards and not self._guards[name].drain(CHECKPOINT_SECONDS):
                logger.warning(f"sink {name}: steps before this checkpoint are not all written")
        return {"next_step": self._next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the checkpoint's step: sinks forget what was written of later ones, so that none is twice."""
        if "next_step" not in state:
            logger.warning("this checkpoint holds no state of the recorder: steps already written may appear twice")
            return
        self._next_step = state["next_step"]
        for guard in self._guards.values():
            guard.rewind(self._next_step)

    def close(self) -> None:
        """Writes what waits, in at most 30 s for all sinks together, and closes them. May be called again; also called at exit."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if collecting.active() is self._collector:
            collecting.activate(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for guard in self._guards.values():
            guard.finish()
        for guard in self._guards.values():
            guard.join(max(0.0, deadline - time.monotonic()))
        if self._enabled and self.config.report and self._rank == 0 and self._next_step:
            self._at_end(self._run_folder)

    def _start(self, chosen: dict[str, tuple[type[Sink], Mode]], run_folder: Path, **run: Any) -> None:
        """Builds this rank's sinks, each behind a guard."""
        mine = {name: pair for name, pair in chosen.items() if self._rank == 0 or pair[1] != "global_reduce"}
        run_id = _run_id(run_folder) if mine else ""
        for name, (sink, mode) in mine.items():
            context = SinkContext(
                config=self.config, mode=mode, run_folder=run_folder, run_id=run_id, rank=self._rank,
                decode=self._decode, **run,
            )  # fmt: skip
            streams = mode == "per_rank_no_reduce"
            most = self.config.queue_size * (VALUES_A_STEP if streams else 1)
            guard = self._guards[name] = Guard(name, functools.partial(sink, context), most, mode)
            if streams:
                self._collector.listeners.append(
                    lambda key, value, guard=guard: guard.stream(key, value, self._next_step)
                )

    def _write(self, step: int, collections: list[Collection], mode: Mode, started: float) -> dict[str, float]:
        """Merges ranks, hands the step to the sinks of a mode, and returns its values.

        `started`: as if all time since then had gone into this step's metrics.
        """
        collection, *others = collections
        for other in others:
            collection.merge(other, self._collector.warn)
        guards = self._guards.values()
        selected = {key: self._selection.select(rows, step) for key, rows in collection.tables.items()}
        values = collection.values()
        values["obs/dropped_rows"] = float(sum(guard.dropped_rows for guard in guards))
        values["obs/sink_errors"] = float(sum(guard.disabled for guard in guards))
        values["obs/rejected_values"] = float(self._collector.rejected)
        values["obs/overhead_ms"] = 1e3 * (time.perf_counter() - started)
        record = StepRecord(
            step=step,
            time_s=time.time(),
            values=values,
            charts=self._slim[mode](values) if self.config.slim else values,
            tables={key: self._schema.fit(key, table.shown, step) for key, table in selected.items() if table.shown},
            kept={key: table.kept for key, table in selected.items()},
            traces=[row for table in selected.values() for row in table.traces],
            distributions=collection.distributions(),
        )
        for guard in guards:
            if guard.mode == mode:
                guard.submit(record)
        return dict(values)

    def _guarded(self, doing: str, call: Callable[[], Any], otherwise: Any) -> Any:
        """The call's result, or `otherwise` after an error, which is logged whole the first time."""
        try:
            return call()
        except Exception:
            self._collector.rejected += 1
            if f"flush {doing}" not in self._failed:
                self._failed.add(f"flush {doing}")
                logger.exception(f"metrics: {doing} failed; this step's metrics are incomplete and training goes on")
            return otherwise


def _run_id(run_folder: Path) -> str:
    """The run's eight hex digits, made by whichever rank comes first and kept in the run folder."""
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / "run_id"
    try:
        with open(path, "x") as file:
            file.write(uuid.uuid4().hex[:8])
    except FileExistsError:
        deadline = time.monotonic() + 2.0
        while len(path.read_text()) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
    return path.read_text()
