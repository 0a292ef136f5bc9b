"""Reads a run folder for the report. Missing, incomplete or odd data become a note; they never fail the report."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FILES = (
    "metrics.jsonl",
    "samples.jsonl",
    "samples.unfinished.jsonl",
    "end.json",
)
"""A folder with one of them is a run's."""
READ_BYTES = 64 * 1024**2
"""Size of samples.jsonl from which only the rows are read that a run without keep_all_rows has."""
LOG_BYTES = 16 * 1024**2
"""Limit for a log. Only the end of a larger log is read."""
MAX_WARNINGS = 100
"""Largest number of different warnings to show for a run."""

HELD_OUT_SPLIT = "eval_greedy"
"""The split of the greedy evaluation's rows."""
_TABLES = (None, "rollout/samples", "evaluation/samples")
"""Tables of episodes: an episode_id is in one of them."""

_CHOSEN = re.compile(rb'"select_reason": "[^"]|"unfinished": true|"split": "eval_greedy"')
"""Matches the rows that are read of a large file: those that selectors chose, of a step that failed, and of the greedy evaluation."""
_WARNING = re.compile(r"^(\S+ \S+) (WARNING|ERROR|CRITICAL) (.*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(slots=True)
class Warned:
    """A warning of a run, and how often it occurred. Warnings that differ only in numbers count as one."""

    text: str
    level: str
    first: str
    """Time of the first occurrence, as written in the log."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended, as its end.json says.

    Example: End(outcome="failed", error="KeyError: 3", message="Traceback ...", code=1, rank=1, phase="step 3: grade")
    """

    outcome: str
    """done, evaluated, stopped, failed, killed or hung."""
    error: str = ""
    """The error without its traceback; "" if the message is no traceback."""
    message: str = ""
    code: int = 0
    """The exit code: 128 and the signal's number for a run that a signal stopped."""
    rank: int | None = None
    phase: str = ""


@dataclass(slots=True, kw_only=True)
class Run:
    """One run's data, as read from its folder.

    Example: Run(name="debug_0", folder=Path("outputs/debug_0"), steps=[1, 2], series={"reward/mean": [0.4, None]})
    """

    name: str
    folder: Path
    steps: list[int] = field(default_factory=list)
    """Ascending, each once."""
    series: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of each metric, one for each of `steps`; None where it has no value."""
    times: list[float | None] = field(default_factory=list)
    """Unix time of each of `steps`, seconds."""
    rows: list[Row] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    end: End | None = None
    """None while the run goes on, and if nothing could write it."""
    warnings: list[Warned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about data that could not be read properly."""
    part_note: str = ""
    """Says which part of a large samples.jsonl was read; "" if all of it was."""

    @property
    def total_steps(self) -> int | None:
        """The configured number of steps; None if the config does not say."""
        total = self.setting("num_steps")
        return total if isinstance(total, int) else None

    def setting(self, path: str) -> Any:
        """A field of the config; None if there is none. Example: setting("evaluation.num_prompts") == 256"""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def worked_s(self) -> float | None:
        """Seconds of training up to the last step, without the time in which the run was stopped; None if fewer than two steps have
        a time."""
        timed = [(place, at) for place, at in enumerate(self.times) if at is not None]
        if len(timed) < 2:
            return None
        empty = [None] * len(self.steps)
        steps, saves = (self.series.get(f"time/{k}", empty) for k in ("step", "checkpoint/save"))
        total = 0.0
        for (_, before), (place, at) in zip(timed, timed[1:]):
            measured = (steps[place] or 0.0) + (saves[place] or 0.0)
            total += min(at - before, measured) if measured else at - before
        return total

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the metric at the steps where it has a value."""
        values = self.series.get(key, [])
        known = [(step, value) for step, value in zip(self.steps, values) if value is not None]
        return [step for step, _ in known], [value for _, value in known]


def load_run(folder: Path) -> Run:
    """Reads the run in `folder`. Raises FileNotFoundError if the folder does not exist or is not a run."""
    if not any((folder / file).is_file() for file in FILES):
        raise FileNotFoundError(
            f"{folder} has neither metrics.jsonl nor samples.jsonl: expected the folder of a run"
        )
    run = Run(name=folder.resolve().name, folder=folder)
    run.config = _document(folder / "config.json", run.notes)
    run.environment = _document(folder / "environment.json", run.notes)
    run.end = _end(folder / "end.json", run.notes)
    _read_metrics(run)
    run.rows = list(_read_rows(folder / "samples.jsonl", run))
    run.warnings = list(_read_warnings(sorted((folder / "logs").glob("*.log"))))
    return run


def number(value: Any) -> float | None:
    """The value if it is a finite number and not a bool, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return content if isinstance(content, dict) else {}
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {error}")
    return {}


def _end(path: Path, notes: list[str]) -> End | None:
    content = _document(path, notes) if path.exists() else {}
    if not isinstance(content.get("outcome"), str):
        return None
    types = {"outcome": str, "error": str, "message": str, "code": int, "rank": int, "phase": str}
    return End(**{k: v for k, v in content.items() if k in types and isinstance(v, types[k])})


def _objects(run: Run, name: str, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number of the line, its JSON object) for lines with a step. A note counts the lines that have none."""
    damaged = 0
    for place, line in enumerate(lines):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            yield place, content
        elif line.strip():
            damaged += 1
    if damaged:
        run.notes.append(
            f"{name}: {damaged} {'line' if damaged == 1 else 'lines'} could not be read"
        )


def _lines(*paths: Path) -> Iterator[bytes]:
    """The lines of the files that there are, in this order."""
    for path in paths:
        if path.is_file():
            with open(path, "rb") as lines:
                yield from lines


def _read_metrics(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        run.notes.append("metrics.jsonl is missing")
        return
    by_step = {line["step"]: line for _, line in _objects(run, path.name, _lines(path))}
    run.steps = sorted(by_step)
    run.times = [number(by_step[step].get("time")) for step in run.steps]
    keys = dict.fromkeys(key for step in run.steps for key in by_step[step])
    for key in keys:
        values = [number(by_step[step].get(key)) for step in run.steps]
        if key not in ("step", "time") and any(value is not None for value in values):
            run.series[key] = values


def _read_rows(path: Path, run: Run) -> Iterator[Row]:
    """Yields the stored rows, or a part of a large file's rows. Rows repeated after a resume appear once."""
    if not path.is_file():
        run.notes.append("samples.jsonl is missing: no samples are shown")
        return
    is_large = path.stat().st_size > READ_BYTES
    lines = _lines(path, path.with_name("samples.unfinished.jsonl"))
    if is_large:
        lines = (line if _CHOSEN.search(line) else b"" for line in lines)
    latest: dict[str, Row] = {}
    for place, row in _objects(run, path.name, lines):
        row["episode_id"] = _identity(row, place)
        latest[row["episode_id"]] = row
    if is_large:
        run.part_note = f"samples.jsonl is large: {len(latest):,} of its rows were read, the selected rows and those of the greedy evaluation"
    yield from latest.values()


def _identity(row: Row, place: int) -> str:
    """The row's name in links: it stays the same when the run grows. `place`: the number of the row's line in the file."""
    name = str(row.get("episode_id", f"line {place}"))
    return name if row.get("table") in _TABLES else f"{row['table']}: {name}"


def _read_warnings(paths: list[Path]) -> Iterator[Warned]:
    """The distinct warnings and errors in the logs, the most frequent first."""
    distinct: dict[str, Warned] = {}
    for path in paths:
        for line in _log_lines(path):
            if matched := _WARNING.match(line):
                time, level, text = matched.groups()
                new = Warned(text[:2000], level, time, 0)
                distinct.setdefault(_NUMBER.sub("#", text), new).count += 1
    yield from sorted(distinct.values(), key=lambda warned: -warned.count)[:MAX_WARNINGS]


def _log_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
