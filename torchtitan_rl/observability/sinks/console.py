"""The console sink: one line per step, and at intervals panels of metrics and samples."""

import fnmatch
import math
from collections.abc import Callable
from typing import NamedTuple

from rich.text import Text

from torchtitan_rl.observability.panels import metrics_grid, plain_console, sample_panel
from torchtitan_rl.observability.sample_rows import Row
from torchtitan_rl.observability.sinks.base import Sink, SinkContext, StepRecord


class Column(NamedTuple):
    """One number of the step line."""

    label: str
    keys: tuple[str, ...]
    """Patterns of keys. The first recorded key that matches, in the order of the patterns, is shown."""
    show: Callable[[float], str]
    width: int
    style: str = ""


def duration(seconds: float) -> str:
    """Formats seconds, as "1:02:03" or "2:03"."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def percent(value: float) -> str:
    """Formats a share: 0.975 as "97.5%"."""
    return f"{100 * value:.1f}%"


STEP_LINE = (
    Column("reward", ("reward/mean",), "{:.3f}".format, 7, "bold green"),
    Column("accuracy", ("evaluation/accuracy", "evaluation/*/accuracy"), percent, 6, "bold cyan"),
    Column("loss", ("loss/total", "loss/mean", "loss"), "{:.4f}".format, 8),
    Column("entropy", ("policy/entropy", "policy/entropy/mean"), "{:.3f}".format, 6),
    Column("grad", ("optimizer/grad_norm",), "{:.3f}".format, 7),
    Column("logp diff", ("sampler/logprob_diff/max",), "{:.1e}".format, 7),
    Column("tok/s", ("perf/step_tokens_per_s", "perf/generated_tokens_per_s"), "{:,.0f}".format, 7),
)
LOST = {
    "lost/padding_s": "padding",
    "lost/imbalance_s": "uneven ranks",
    "lost/waiting_s": "waiting for replicas",
    "generator/tail_s": "last completions",
    "generator/prompts_s": "reading prompts",
    "time/generate/environments": "environments",
    "time/grade": "rewards",
    "time/sync": "weight sync",
    "time/unaccounted": "unaccounted",
}
"""Metrics of avoidable seconds in a step, and their names in the step line."""

EVALUATION_PREFIX = "evaluation/"
MAX_SAMPLES = 6
"""Samples of one table printed in a step."""


def lost(values: dict[str, float]) -> str:
    """The largest avoidable share of a step, such as "last completions 32%"; "" if it is below 10 %."""
    seconds, name = max((values.get(key, 0.0), name) for key, name in LOST.items())
    share = seconds / values["time/step"] if values.get("time/step") else 0.0
    return f"{name} {share:.0%}" if share >= 0.1 else ""


class ConsoleSink(Sink):
    """Prints one aligned line per step, and a second one in evaluation steps. Coloured only on a terminal.

    Every `console_every` steps it also prints the metrics that match `console_metrics`, and the selected samples.
    Evaluation samples are printed in every evaluation.
    """

    def __init__(self, context: SinkContext) -> None:
        super().__init__(context)
        self._console = plain_console()
        self._first: tuple[int, float] | None = None

    def write(self, record: StepRecord) -> None:
        """Prints the step's line, an evaluation's line, and every `console_every` steps some samples."""
        self._console.print(self._step_line(record), soft_wrap=True)
        if any(key.startswith(EVALUATION_PREFIX) for key in record.values):
            self._console.print(self._evaluation_line(record), soft_wrap=True)
        every = self.context.config.console_every
        if every <= 0:
            return
        due = record.step % every == 0
        if due:
            self._console.print(metrics_grid(self._matched(record.values), self._console))
        for key, rows in record.tables.items():
            if due or key.startswith(EVALUATION_PREFIX):
                self._print_samples(key, rows)

    def _matched(self, values: dict[str, float]) -> dict[str, float]:
        """The values that match the patterns, in the patterns' order."""
        names = [n for pattern in self.context.config.console_metrics for n in fnmatch.filter(values, pattern)]
        return {name: values[name] for name in dict.fromkeys(names)}

    def _print_samples(self, key: str, rows: list[Row]) -> None:
        self._console.print(Text(f"{key}: {len(rows)} row{'s' * (len(rows) != 1)}", style="bold"))
        for row in rows[:MAX_SAMPLES]:
            self._console.print(sample_panel(row, self._console))
        if len(rows) > MAX_SAMPLES:
            left_out = (
                f"{len(rows) - MAX_SAMPLES} more selected rows of {key}: python -m torchtitan_rl.observability.samples"
            )
            self._console.print(Text(f"{left_out} {self.context.run_folder}", style="dim"), soft_wrap=True)

    def _step_line(self, record: StepRecord) -> Text:
        width = len(str(self.context.total_steps))
        line = Text(f"step {record.step:>{width}}/{self.context.total_steps}", style="bold")
        for column in STEP_LINE:
            found = [key for pattern in column.keys for key in fnmatch.filter(record.values, pattern)]
            value = record.values[found[0]] if found else None
            if value is None and any(f"{key}/non_finite" in record.values for key in column.keys):
                value = math.nan
            shown = "-" if value is None else column.show(value)
            line.append(f"  {column.label} ", style="dim")
            line.append(f"{shown:>{column.width}}", style=column.style if value is not None else "dim")
        seconds, remaining = self._times(record)
        line.append(f"  {seconds:>7}").append("  ETA ", style="dim").append(f"{remaining:>7}")
        return line.append("  lost ", style="dim").append(hint) if (hint := lost(record.values)) else line

    def _times(self, record: StepRecord) -> tuple[str, str]:
        """The step's seconds, and the estimated time of the remaining steps at this session's mean pace."""
        pace = seconds = record.values.get("time/step")
        first_step, first_s = self._first = self._first or (record.step, record.time_s)
        if record.step > first_step:
            pace = (record.time_s - first_s) / (record.step - first_step)
        remaining = max(0, self.context.total_steps - record.step)
        return "-" if seconds is None else f"{seconds:.1f} s", "-" if pace is None else duration(pace * remaining)

    def _evaluation_line(self, record: StepRecord) -> Text:
        line = Text("  evaluation", style="cyan")
        for key, value in record.values.items():
            if key.startswith(EVALUATION_PREFIX) and not key.endswith("/seconds"):
                name = key.removeprefix(EVALUATION_PREFIX)
                fraction = any(part in name for part in ("accuracy", "pass@", "rate"))
                line.append(f"  {name.replace('_', ' ')} ", style="dim")
                line.append(percent(value) if fraction else f"{value:.4g}")
        return line
