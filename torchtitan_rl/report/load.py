"""Reads a run's folder for the report. Whatever is missing, torn or odd costs a note, never the report."""

import json
import math
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

READ_BYTES = 64 * 1024**2
"""Of a larger samples.jsonl, about this much is parsed: the selected rows, and whole groups drawn by a hash."""
LOG_BYTES = 16 * 1024**2
"""Of a larger log, only this much of its end is read."""
MAX_WARNINGS = 100
"""Different warnings of a run that are shown."""

_GROUP = re.compile(rb'"episode_id": "((?:[^"\\]|\\.)*)/[^/"]*"')
_WARNING = re.compile(r"^(\S+ \S+) (WARNING|ERROR|CRITICAL) (.*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(slots=True)
class Warned:
    """A warning that a run gave, and how often: those that differ in numbers only are one."""

    text: str
    level: str
    first: str
    """When, as the log says it."""
    count: int = 1


@dataclass(slots=True, kw_only=True)
class Run:
    """What the report knows of one run.

    Example: Run(name="debug_0", folder=Path("outputs/debug_0"), steps=[1, 2], series={"reward/mean": [0.4, None]})
    """

    name: str
    folder: Path
    steps: list[int] = field(default_factory=list)
    """Ascending, each once."""
    series: dict[str, list[float | None]] = field(default_factory=dict)
    """Each metric's value at every one of `steps`; None where there is none."""
    times: list[float | None] = field(default_factory=list)
    """Unix time of every one of `steps`, seconds."""
    rows: list[Row] = field(default_factory=list)
    num_stored_rows: int = 0
    """Rows in samples.jsonl, of which `rows` may be a part."""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read as it should be, in words."""

    @property
    def total_steps(self) -> int | None:
        """Steps that were asked for; None where the config does not say."""
        total = self.config.get("num_steps")
        return total if isinstance(total, int) else None

    @property
    def finished(self) -> bool:
        """Whether the last step that was asked for is there."""
        return bool(self.steps) and self.total_steps is not None and self.steps[-1] >= self.total_steps

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the metric, where it has a value."""
        found = [(step, value) for step, value in zip(self.steps, self.series.get(key, ())) if value is not None]
        return [step for step, _ in found], [value for _, value in found]


def load_run(folder: Path, name: str | None = None) -> Run:
    """The run in `folder`. Raises FileNotFoundError where there is no such folder, or it holds nothing of a run."""
    if not any((folder / file).is_file() for file in ("metrics.jsonl", "metrics.rank0.jsonl", "samples.jsonl")):
        raise FileNotFoundError(f"{folder} holds neither metrics.jsonl nor samples.jsonl: expected the folder of a run")
    run = Run(name=name or folder.resolve().name, folder=folder)
    run.config = _document(folder / "config.json", run.notes)
    run.environment = _document(folder / "environment.json", run.notes)
    _read_metrics(run)
    run.rows = list(_read_rows(folder / "samples.jsonl", run))
    run.warnings = list(_read_warnings(sorted((folder / "logs").glob("*.log"))))
    return run


def unique_names(folders: Iterable[Path]) -> list[str]:
    """A short name for each folder: its last part, with as many parts before as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max((len(p) for p in parts), default=0) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(p[-1:])} ({place})" for place, p in enumerate(parts, 1)]


def correlation(a: list[float], b: list[float]) -> float | None:
    """Pearson's r; None for fewer than 3 pairs or a constant."""
    try:
        return statistics.correlation(a, b) if len(a) >= 3 else None
    except statistics.StatisticsError:
        return None


def number(value: Any) -> float | None:
    """The value if it is a finite number (no bool), else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {error}")
    return {}


def _lines(path: Path, run: Run) -> Iterator[dict[str, Any]]:
    """Each line that holds a JSON object; the number of those that do not becomes a note."""
    torn = 0
    with open(path, "rb") as lines:
        for line in lines:
            if found := _object(line):
                yield found
            else:
                torn += bool(line.strip())
    if torn:
        run.notes.append(f"{path.name}: {torn} line{'s' * (torn > 1)} could not be read and are left out")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _read_metrics(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        path = run.folder / "metrics.rank0.jsonl"
        run.notes.append("metrics.jsonl is missing" + ("; rank 0's own metrics are shown" if path.is_file() else ""))
    if not path.is_file():
        return
    by_step: dict[int, dict[str, Any]] = {}
    again = 0
    for line in _lines(path, run):
        step = line.pop("step")
        if "key" in line and "value" in line:  # a stream: one value a line
            by_step.setdefault(step, {})[str(line["key"])] = line["value"]
        else:
            again += step in by_step
            by_step[step] = line
    if again:
        run.notes.append(f"{path.name}: {again} steps are there twice, as after a resumption; the later ones are shown")
    run.steps = sorted(by_step)
    run.times = [number(by_step[step].get("time")) for step in run.steps]
    keys = dict.fromkeys(key for step in run.steps for key in by_step[step] if key != "time")
    columns = {key: [number(by_step[step].get(key)) for step in run.steps] for key in keys}
    run.series = {key: values for key, values in columns.items() if any(value is not None for value in values)}


def _read_rows(path: Path, run: Run) -> Iterator[Row]:
    """The stored rows, of a large file a part of them; the latest of those with one episode_id in one table."""
    if not path.is_file():
        run.notes.append("samples.jsonl is missing: no samples are shown")
        return
    share = READ_BYTES / max(path.stat().st_size, READ_BYTES)
    latest: dict[Any, Row] = {}
    torn = 0
    with open(path, "rb") as lines:
        for place, line in enumerate(lines):
            if not line.strip():
                continue
            run.num_stored_rows += 1
            if share < 1 and not _drawn(line, share):
                continue
            row = _object(line)
            torn += row is None
            if row is not None:
                latest[(row.get("table"), row.get("episode_id", place))] = row
    if share < 1:
        run.notes.append(
            f"samples.jsonl is large: {len(latest):,} of its {run.num_stored_rows:,} rows were read, the selected ones "
            "and whole groups drawn by chance"
        )
    if torn:
        run.notes.append(f"samples.jsonl: {torn} line{'s' * (torn > 1)} could not be read and are left out")
    yield from latest.values()


def _drawn(line: bytes, share: float) -> bool:
    """Whether the row is read of a large file: siblings share their fate, selected rows are always read."""
    group = _GROUP.search(line)
    return zlib.crc32(group[1] if group else line) < share * 2**32 or b'"select_reason": ""' not in line


def _read_warnings(paths: list[Path]) -> Iterator[Warned]:
    """The different warnings and errors of the logs, the most frequent first."""
    found: dict[str, Warned] = {}
    for path in paths:
        for line in _log_lines(path):
            if matched := _WARNING.match(line):
                time, level, text = matched.groups()
                known = found.setdefault(_NUMBER.sub("#", text), Warned(text[:2000], level, time, 0))
                known.count += 1
    yield from sorted(found.values(), key=lambda warned: -warned.count)[:MAX_WARNINGS]


def _log_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def answers_given(rows: list[Row]) -> Counter[str]:
    """To how many different prompts each answer was given (a response stands for the answer where none is extracted)."""
    pairs = {(str(r.get("prompt")), str(r.get("answer") or r.get("response"))) for r in rows if r.get("response")}
    return Counter(answer for _, answer in pairs)
