"""Reads a run folder for the report. Missing files become a note; damaged lines and files are left out; none fails the report."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.observe.line_file import read_lines

Row = dict[str, Any]

FILES = ("metrics.jsonl", "samples.jsonl", "samples.unfinished.jsonl", "end.json")
"""A folder with one of them is a run's."""
READ_BYTES = 64 * 1024**2
"""Size of samples.jsonl from which only the rows are kept that a run without keep_all_rows has."""
LOG_BYTES = 16 * 1024**2
"""Limit for a log. Only the end of a larger log is read."""
MAX_WARNINGS = 100
"""Largest number of different warnings to show for a run."""
LIBRARIES = ("vllm", "torch", "transformers", "huggingface_hub", "datasets", "wandb", "py")
"""Loggers whose warnings say little about a run. `py` is of py.warnings, Python's own."""

_TABLES = (None, "rollout/samples", "evaluation/samples")
"""Tables of episodes: an episode_id is in one of them."""
_WARNING = re.compile(r"^(\S+ \S+) (WARNING|ERROR|CRITICAL) (([^.:]*).*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


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
    last_time: float | None = None
    """Unix time of the last step, seconds."""
    rows: list[Row] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    """How the run ended, as `run_end.write_end` writes it. Empty while the run goes on, and if nothing could write it."""
    resumes: list[dict[str, Any]] = field(default_factory=list)
    """The starts that went on with another config: the step from which, and what changed, by field. Ascending."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """The distinct warnings and errors of the logs, the most frequent first and libraries' warnings last: text, level, count,
    library, and first, the time of the first one. Those that differ only in numbers count as one."""
    notes: list[str] = field(default_factory=list)
    """Sentences about data that are not there or not all read."""

    def setting(self, path: str) -> Any:
        """A field of the config; None if there is none. Example: setting("evaluation.num_prompts") == 256"""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the metric at the steps where it has a value."""
        values = self.series.get(key, [])
        known = [(step, value) for step, value in zip(self.steps, values) if value is not None]
        return [step for step, _ in known], [value for _, value in known]


def load_run(folder: Path) -> Run:
    """Reads the run in `folder`. Raises FileNotFoundError if the folder does not exist or is not a run."""
    if not any((folder / file).is_file() for file in FILES):
        expected = "expected the folder of a run"
        raise FileNotFoundError(f"{folder} has neither metrics.jsonl nor samples.jsonl: {expected}")
    run = Run(name=folder.resolve().name, folder=folder)
    for name in ("config.json", "environment.json", *FILES[:2]):
        if not (folder / name).is_file():
            run.notes.append(f"{name} is missing")
    run.config = _document(folder / "config.json")
    run.environment = _document(folder / "environment.json")
    run.end = _document(folder / "end.json")
    run.resumes = _read_resumes(folder)
    _read_metrics(run)
    _read_rows(run)
    run.warnings = _read_warnings(sorted((folder / "logs").glob("*.log")))
    return run


def number(value: Any) -> float | None:
    """The value if it is a finite number and not a bool, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _document(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty if it has none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_resumes(folder: Path) -> list[dict[str, Any]]:
    """The run's resumes with changes; what a later start took back, by going on from an earlier step, is left out."""
    former = sorted(folder.glob("config-*.json"), key=lambda path: (len(path.name), path.name))
    resumes: list[dict[str, Any]] = []
    for path in (*former, folder / "config.json"):
        resumed = _document(path).get("resumed") or {"step": 0, "changed": {}}
        changed = {name: to for name, to in resumed["changed"].items() if name != "num_steps"}
        kept = [earlier for earlier in resumes if earlier["step"] < resumed["step"]]
        resumes = [*kept, {"step": resumed["step"], "changed": changed}] if changed else kept
    return resumes


def _lines(path: Path, end: bytes) -> Iterator[dict[str, Any]]:
    return (line for line in read_lines(path, end) if isinstance(line["step"], int))


def _read_metrics(run: Run) -> None:
    by_step = {line["step"]: line for line in _lines(run.folder / "metrics.jsonl", b"\n")}
    run.steps = sorted(by_step)
    if run.steps:
        run.last_time = number(by_step[run.steps[-1]].get("time"))
    for key in dict.fromkeys(key for step in run.steps for key in by_step[step]):
        values = [number(by_step[step].get(key)) for step in run.steps]
        if key not in ("step", "time") and any(value is not None for value in values):
            run.series[key] = values


def _read_rows(run: Run) -> None:
    """Reads the stored rows, or a part of a large file's rows. Rows repeated after a resume appear once."""
    path = run.folder / "samples.jsonl"
    is_large = path.is_file() and path.stat().st_size > READ_BYTES
    latest: dict[str, Row] = {}
    files = path, path.with_name("samples.unfinished.jsonl")
    rows = itertools.chain.from_iterable(_lines(file, b" \n") for file in files)
    for place, row in enumerate(rows):
        chosen = row.get("select_reason") or row.get("unfinished")
        if not is_large or chosen or row.get("split") == "eval_greedy":
            row["episode_id"] = _identity(row, place)
            latest[row["episode_id"]] = row
    if is_large:
        run.notes.append(
            f"samples.jsonl is large: {len(latest):,} of its rows were read, the selected rows and those of the greedy evaluation"
        )
    run.rows = list(latest.values())


def _identity(row: Row, place: int) -> str:
    """The row's name in links: it stays the same when the run grows. `place`: the row's number in the file."""
    name = str(row.get("episode_id", f"row {place}"))
    return name if row.get("table") in _TABLES else f"{row['table']}: {name}"


def _read_warnings(paths: list[Path]) -> list[dict[str, Any]]:
    distinct: dict[str, dict[str, Any]] = {}
    for path in paths:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        for matched in filter(None, map(_WARNING.match, lines)):
            first, level, text, logger = matched.groups()
            warning = {"text": text[:2000], "level": level, "first": first, "count": 0}
            warning["library"] = level == "WARNING" and logger in LIBRARIES
            distinct.setdefault(_NUMBER.sub("#", text), warning)["count"] += 1

    def place(warning: dict[str, Any]) -> tuple[bool, int]:
        return warning["library"], -warning["count"]

    # Errors first: however many warnings there are, none of them is cut.
    ordered = sorted(sorted(distinct.values(), key=place), key=lambda w: w["level"] == "WARNING")
    return sorted(ordered[:MAX_WARNINGS], key=place)
