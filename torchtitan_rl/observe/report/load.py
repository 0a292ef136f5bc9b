"""Reads a run folder for the report. Missing, incomplete or odd data become a note; they never fail the report."""

import json
import math
import re
from collections.abc import Iterator
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
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def worked_s(self) -> float | None:
        """Seconds of training up to the last step, without the time in which the run was stopped; None if fewer than two steps have
        a time."""
        timed = [(place, at) for place, at in enumerate(self.times) if at is not None]
        if len(timed) < 2:
            return None
        total = 0.0
        for (_, before), (place, at) in zip(timed, timed[1:]):
            parts = [
                self.series[key][place]
                for key in ("time/step", "time/checkpoint/save")
                if key in self.series
            ]
            own = sum(value for value in parts if value is not None)
            total += min(at - before, own) if own else at - before
        return total

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the metric at the steps where it has a value."""
        found = [
            (step, value)
            for step, value in zip(self.steps, self.series.get(key, ()))
            if value is not None
        ]
        return [step for step, _ in found], [value for _, value in found]


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
    return (
        value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {error}")
    return {}


def _end(path: Path, notes: list[str]) -> End | None:
    found = _document(path, notes) if path.exists() else {}
    if not isinstance(found.get("outcome"), str):
        return None
    return End(
        outcome=found["outcome"],
        error=str(found.get("error") or ""),
        message=str(found.get("message") or ""),
        code=found["code"] if isinstance(found.get("code"), int) else 0,
        rank=found["rank"] if isinstance(found.get("rank"), int) else None,
        phase=str(found.get("phase") or ""),
    )


def _lines(path: Path, run: Run) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each line. A note counts the lines that have none."""
    torn = 0
    with open(path, "rb") as lines:
        for line in lines:
            if found := _object(line):
                yield found
            else:
                torn += bool(line.strip())
    if torn:
        run.notes.append(f"{path.name}: {torn} line{'s' * (torn > 1)} could not be read")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _read_metrics(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        run.notes.append("metrics.jsonl is missing")
        return
    by_step = {line.pop("step"): line for line in _lines(path, run)}
    run.steps = sorted(by_step)
    run.times = [number(by_step[step].get("time")) for step in run.steps]
    keys = dict.fromkeys(key for step in run.steps for key in by_step[step] if key != "time")
    columns = {key: [number(by_step[step].get(key)) for step in run.steps] for key in keys}
    run.series = {
        key: values for key, values in columns.items() if any(value is not None for value in values)
    }


def _read_rows(path: Path, run: Run) -> Iterator[Row]:
    """Yields the stored rows, or a part of a large file's rows. Rows repeated after a resume appear once."""
    if not path.is_file():
        run.notes.append("samples.jsonl is missing: no samples are shown")
        return
    is_large = path.stat().st_size > READ_BYTES
    latest: dict[str, Row] = {}
    torn = 0
    for place, line in enumerate(_lines_of(path, path.with_name("samples.unfinished.jsonl"))):
        if not line.strip():
            continue
        if is_large and not _CHOSEN.search(line):
            continue
        row = _object(line)
        torn += row is None
        if row is not None:
            row["episode_id"] = _identity(row, place)
            latest[row["episode_id"]] = row
    if is_large:
        run.part_note = (
            f"samples.jsonl is large: {len(latest):,} of its {place + 1:,} rows were read, the selected rows and those "
            "of the greedy evaluation"
        )
    if torn:
        run.notes.append(f"samples.jsonl: {torn} line{'s' * (torn > 1)} could not be read")
    yield from latest.values()


def _lines_of(*paths: Path) -> Iterator[bytes]:
    """The lines of the files that there are, in this order."""
    for path in paths:
        if path.is_file():
            with open(path, "rb") as lines:
                yield from lines


def _identity(row: Row, place: int) -> str:
    """The row's name in links: it stays the same when the run grows. `place`: the number of the row's line in the file."""
    name = str(row.get("episode_id", f"line {place}"))
    return name if row.get("table") in _TABLES else f"{row['table']}: {name}"


def _read_warnings(paths: list[Path]) -> Iterator[Warned]:
    """The distinct warnings and errors in the logs, the most frequent first."""
    found: dict[str, Warned] = {}
    for path in paths:
        for line in _log_lines(path):
            if matched := _WARNING.match(line):
                time, level, text = matched.groups()
                known = found.setdefault(
                    _NUMBER.sub("#", text), Warned(text[:2000], level, time, 0)
                )
                known.count += 1
    yield from sorted(found.values(), key=lambda warned: -warned.count)[:MAX_WARNINGS]


def _log_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
