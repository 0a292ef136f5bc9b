"""The console sink: one line per step, and at intervals panels of metrics and samples."""

import fnmatch
import math
from collections.abc import Callable
from typing import NamedTuple

from rich.text import Text

from torchtitan_rl.observe.panels import (
    EVALUATION_PREFIX,
    evaluation_measures,
    metric_table,
    percent,
    plain_console,
    sample_panel,
)
from torchtitan_rl.observe.sample_rows import Row
from torchtitan_rl.observe.sinks.base import Sink, SinkContext, StepRecord


class Column(NamedTuple):
    """One number of the step line."""

    label: str
    key: str
    show: Callable[[float], str]
    width: int
    style: str = ""


def duration(seconds: float) -> str:
    """Formats seconds, as "1:02:03", "2:03" or, from 100 hours on, "4.5 days"."""
    if seconds >= 360_000:
        return f"{seconds / 86_400:.3g} days"
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def six_wide(value: float) -> str:
    """Formats a number in six characters, as "1.169", "-12.35" or "1234.5"."""
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


STEP_LINE = (
    Column("reward", "reward/mean", six_wide, 6, "bold green"),
    Column("accuracy", "train/accuracy", percent, 6, "bold cyan"),
    Column("cut off", "completions/clipped_fraction", "{:.0%}".format, 4),
    Column("loss", "loss/total", "{:.4f}".format, 7),
    Column("entropy", "policy/entropy", "{:.3f}".format, 5),
    Column("grad", "optimizer/grad_norm", six_wide, 6),
    Column("tok/s", "perf/step_tokens_per_s", "{:,.0f}".format, 7),
)
"""In 80 characters, the first two or three that a run has fit; in 120, all but tok/s. "cut off", completions that did not end by
themselves, mostly at the length limit, is there from the first step on that has any."""
PANEL_METRICS = (
    "reward/mean", "reward/std", "reward/*/mean", "train/accuracy", "groups/*", "advantage/std", "completions/length/m*",
    "completions/clipped_fraction", "diversity/*/macro", "loss/policy", "loss/kl", "policy/entropy", "policy/kl_k3",
    "ratio/clip_fraction", "sampler/logprob_diff/m*", "sampler/corrected_fraction", "in_flight/*", "maxent/tau", "maxent/beta",
    "semantic_entropy/mean", "optimizer/grad_norm", "optimizer/learning_rate", "share/*", "idle/*", "time/[!e]*", "time/evaluate",
    "perf/*",
)  # fmt: skip
"""About 35 numbers in a typical step. Those of an evaluation have their own line."""
BUILT_IN_GROUPS = (
    "advantage", "completions", "conversations", "diversity", "entropy", "entropy_bonus", "evaluation",
    "generator", "groups", "idle", "in_flight", "loss", "maxent", "moe", "nonfinite", "obs", "off_policy", "optimizer", "perf",
    "policy", "prompts", "ratio", "reference", "reward", "role_baseline", "sampler", "semantic_entropy", "share", "sync",
    "teacher", "time", "top_entropy", "train",
)  # fmt: skip
"""First parts of the built-in keys. A key of another group is a user's own and is shown, `extra/*` too."""
ACCURACY = f"{EVALUATION_PREFIX}accuracy"
MAX_SAMPLES = 6
"""Samples of one table printed in a step."""


class ConsoleSink(Sink):
    """Prints one aligned line per step, and a second one in evaluation steps. Coloured only on a terminal.

    Every `console_every` steps it also prints the metrics that match `console_metrics`, and the selected samples.
    Evaluation samples are printed in every evaluation.
    """

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._console = plain_console()
        self._first: tuple[int, float] | None = None
        self._held_out: list[tuple[int, float]] = []
        """The steps of evaluations, with their accuracy."""
        self._recorded: set[str] = set()
        """The labels of the columns that are shown: those that had a value in any step."""

    def write(self, record: StepRecord) -> None:
        if ACCURACY in record.values:
            self._held_out.append((record.step, record.values[ACCURACY]))
        self._console.print(self._step_line(record), soft_wrap=True)
        if measures := evaluation_measures(record.values):
            self._console.print(metric_table(measures, self._console))
        every = self.context.config.console_every
        if every <= 0:
            return
        due = record.step % every == 0
        if due:
            self._console.print(metric_table(self._matched(record.values), self._console))
        for key, rows in record.tables.items():
            if due or key.startswith(EVALUATION_PREFIX):
                self._print_samples(key, rows)

    def close(self) -> None:
        """Prints how the held-out accuracy went from this session's first evaluation to its last."""
        if len(self._held_out) > 1:
            (first, before), (last, after) = self._held_out[0], self._held_out[-1]
            way = f"{percent(before)} at step {first}, {percent(after)} at step {last}"
            self._console.print(Text(f"held-out accuracy: {way}", style="bold"))

    def _matched(self, values: dict[str, float]) -> dict[str, float]:
        """The values that match the patterns, in their order, then the user's own; without the evaluation's."""
        others = [name for name in values if not name.startswith(EVALUATION_PREFIX)]
        patterns = [*PANEL_METRICS, *self.context.config.console_metrics]
        names = [name for pattern in patterns for name in fnmatch.filter(others, pattern)]
        own = [name for name in others if name.partition("/")[0] not in BUILT_IN_GROUPS]
        return {name: values[name] for name in dict.fromkeys([*names, *own])}

    def _print_samples(self, key: str, rows: list[Row]) -> None:
        count = f"{min(len(rows), MAX_SAMPLES)} of {len(rows)} selected rows"
        self._console.print(Text(f"{key}: {count}", style="bold"))
        for row in rows[:MAX_SAMPLES]:
            self._console.print(sample_panel(row, self._console))

    def _step_line(self, record: StepRecord) -> Text:
        total = self.context.total_steps
        line = Text(f"step {record.step:>{len(str(total))}}/{total}", style="bold")
        seconds, remaining = self._times(record)
        end = f"  {seconds:>6}  ETA {remaining:>8}"
        values = {
            column.label: record.values.get(column.key, math.nan)
            for column in STEP_LINE
            if {column.key, f"{column.key}/non_finite"} & {*record.values}
        }
        if not values and "time/evaluate" in record.values:
            return line.append(f"  evaluated in {record.values['time/evaluate']:.1f} s")
        self._recorded |= {label for label in values if values[label] or label != "cut off"}
        room = self._console.width - len(line) - len(end)
        for column in [each for each in STEP_LINE if each.label in self._recorded]:
            room -= len(f"  {column.label} ") + column.width
            if room < 0:
                break
            value = values.get(column.label)
            shown = "-" if value is None else column.show(value)
            line.append(f"  {column.label} ", style="dim")
            line.append(f"{shown:>{column.width}}", style="dim" if value is None else column.style)
        return line.append(end)

    def _times(self, record: StepRecord) -> tuple[str, str]:
        """The step's seconds, and the estimated time of the remaining steps at this session's mean pace."""
        pace = seconds = record.values.get("time/step")
        first_step, first_s = self._first = self._first or (record.step, record.time_s)
        if record.step > first_step:
            pace = (record.time_s - first_s) / (record.step - first_step)
        remaining = max(0, self.context.total_steps - record.step)
        eta = "-" if pace is None else duration(pace * remaining)
        if seconds is None:
            return "-", eta
        return f"{seconds:.1f} s" if seconds < 100 else duration(seconds), eta
