"""Builds the page: one HTML file with the runs as JSON data and the scripts, and a second file for samples that do not fit into it.

The page loads nothing else, and the second file only when its reader asks for it.
"""

import base64
import hashlib
import html
import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torchtitan_rl.report.health import health
from torchtitan_rl.report.load import Row, Run, load_run, unique_names
from torchtitan_rl.report.verdicts import ending, time_by_phase, verdicts

CELL_CHARACTERS = 20_000
"""Longer texts are shortened to head and tail."""
SIZE_MB = 5.0
"""Default maximum size of the page. Samples that would exceed it are in the second file."""
MIN_ROW_BYTES = 500_000
"""Bytes that samples may always use, however large the metrics are."""

_SCRIPTS = (
    "base.js",
    "charts.js",
    "overview.js",
    "samples.js",
    "sample.js",
    "compare.js",
    "prompts.js",
    "health.js",
    "app.js",
)
_LEFT_OUT = frozenset(("run_id", "episode_id", "score"))
_PROMPT_COLUMNS = ("table", "split", "step", "prompt_idx")


def write_report(
    folders: Sequence[Path], output: Path, *, size_mb: float = SIZE_MB, refresh_s: float | None = None
) -> list[Run]:
    """Writes the report of the runs to `output` and returns the runs.

    Samples that do not fit are written beside it: to report.samples.js for report.html. The page asks for them by a script tag,
    because a page opened from a file may not read another file in any other way. Both files are replaced atomically, so that an
    open page never reads half a file.

    Args:
        size_mb: maximum size of the page. If samples do not fit, it has the selected ones and randomly chosen whole groups.
        refresh_s: seconds between reloads of an open page while training runs; None: never.

    Raises: FileNotFoundError for a folder that is not a run; OSError if a file cannot be written.
    """
    runs = [load_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)]
    second = output.with_suffix(".samples.js")
    page, rest = render(runs, size_mb=size_mb, refresh_s=refresh_s, second=second.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    if rest:
        _replace(second, rest)
    else:
        second.unlink(missing_ok=True)
    _replace(output, page)
    return runs


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    # A lone surrogate becomes \udxxx, as in JSON.
    unfinished.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, path)


def render(
    runs: Sequence[Run],
    *,
    size_mb: float = SIZE_MB,
    refresh_s: float | None = None,
    second: str = "report.samples.js",
) -> tuple[str, str]:
    """Returns the page as HTML, and the text of its second file, whose name is `second`; "" if all samples fit."""
    asset = resources.files(__package__).joinpath("assets")
    style = "\n".join(asset.joinpath(name).read_text("utf-8") for name in ("uplot-1.6.32.min.css", "report.css"))
    scripts = "\n".join(asset.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    plot = asset.joinpath("uplot-1.6.32.min.js").read_text("utf-8")
    licence = asset.joinpath("uplot-LICENSE.txt").read_text("utf-8").strip()
    code = f"/*\nuPlot 1.6.32\n{licence}\n*/\n{plot}\n(() => {{\n'use strict';\n{scripts}\n}})();"
    budget = int(size_mb * 1e6) - len(code) - len(style)
    content, rest = payload(runs, budget=budget, refresh_s=refresh_s)
    if (size := len(embed(content).encode("utf-8", "replace"))) > budget:  # rows were estimated too small: much markup
        content, rest = payload(runs, budget=int(budget * budget / size), refresh_s=refresh_s)
    script = ""
    if rest:
        rows = embed({"count": len(rest), "columns": _columns(rest)})
        token = hashlib.sha256(rows.encode("utf-8", "replace")).hexdigest()[:16]
        script = f'torchtitanRows("{token}",{json.dumps(rows)})\n'
        content["more"] = {"file": second, "count": len(rest), "mb": round(len(script) / 1e6, 1), "token": token}
    parts = {
        "title": html.escape(" · ".join(run.name for run in runs)),
        "hash": base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        "style": style,
        "data": embed(content),
        "code": code,
    }
    page = asset.joinpath("report.html").read_text("utf-8")
    pieces = [parts.get(piece, piece) if place % 2 else piece for place, piece in enumerate(page.split("%%"))]
    return "".join(pieces), script


def embed(value: Any) -> str:
    """The value as JSON that cannot end its script tag: <, >, & and JavaScript's line separators are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def payload(
    runs: Sequence[Run], *, budget: int, refresh_s: float | None = None
) -> tuple[dict[str, Any], list[tuple[int, Row]]]:
    """Returns the data that the page's scripts read, and the rows that do not fit, each with its run.

    Args:
        budget: bytes for metrics and samples together.
    """
    described = [_described(run) for run in runs]
    budget = max(MIN_ROW_BYTES, budget - len(embed(described)))
    shown, rest = _within([(place, row) for place, run in enumerate(runs) for row in run.rows], budget)
    content = {
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "refresh": refresh_s,
        "more": None,
        "runs": described,
        "rows": {"count": len(shown), "columns": _columns(shown)},
    }
    return content, rest


def _described(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "total": run.total_steps,
        "finished": run.finished,
        "stored": run.num_stored_rows,
        "series": {key: [_rounded(value) for value in values] for key, values in sorted(run.series.items())},
        "ending": _plain(ending(run)),
        "started_s": run.end.started_s if run.end else {},
        "time": {name: _rounded(seconds) for name, seconds in time_by_phase(run).items()},
        "verdicts": [line._asdict() for line in verdicts(run)],
        "health": _plain(health(run)),
        "config": {key: _plain(value) for key, value in flat(run.config).items()},
        "environment": {key: _plain(value) for key, value in flat(run.environment).items()},
    }


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts, joining keys by dots. Example: {"a": {"b": 1}} becomes {"a.b": 1}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _within(rows: list[tuple[int, Row]], budget: int) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    """The rows that fit into the budget and those that do not, in their order. Groups stay whole."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, (run, row) in enumerate(rows):
        groups.setdefault((run, *(str(row.get(column)) for column in _PROMPT_COLUMNS)), []).append(place)

    def urgency(key: tuple[Any, ...]) -> tuple[bool, int]:
        selected = any(rows[place][1].get("select_reason") for place in groups[key])
        return not selected, zlib.crc32(repr(key[1:]).encode())

    kept: set[int] = set()
    seen: set[tuple[str, str]] = set()
    for key in sorted(groups, key=urgency):
        budget -= sum(_bytes(rows[place][1], seen) for place in groups[key])
        if budget < 0:
            break
        kept.update(groups[key])
    return [r for i, r in enumerate(rows) if i in kept], [r for i, r in enumerate(rows) if i not in kept]


def _bytes(row: Row, seen: set[tuple[str, str]]) -> int:
    """Estimates the bytes that the row adds to the file. A text that its column already has is stored as a number."""
    size = 0
    for column, cell in row.items():
        size += len(json.dumps(cell)) if isinstance(cell, (dict, list)) else 7
        if isinstance(cell, str) and (column, cell) not in seen:
            seen.add((column, cell))
            size += min(len(cell.encode("utf-8", "replace")), CELL_CHARACTERS)
    return size


def _columns(rows: list[tuple[int, Row]]) -> dict[str, Any]:
    """Columns by name: {"same": cell}, {"codes": [...], "words": [...]} if cells repeat, or {"cells": [...]}."""
    names = dict.fromkeys(column for _, row in rows for column in row if column not in _LEFT_OUT)
    found = {"run": _packed([run for run, _ in rows])}
    for name in names:
        found[name] = _packed([_cell(row.get(name)) for _, row in rows])
    return found


def _packed(cells: list[Any]) -> dict[str, Any]:
    words: dict[tuple[type, Any], int] = {}  # keyed also by type, because True, 1 and 1.0 are equal
    keys = ((type(cell), json.dumps(cell) if isinstance(cell, (dict, list)) else cell) for cell in cells)
    codes = [words.setdefault(key, len(words)) for key in keys]
    if len(words) == 1:
        return {"same": cells[0]}
    sizes = [len(str(word)) for _, word in words]
    if sum(sizes[code] for code in codes) > sum(sizes) + len(str(len(words))) * len(codes):
        by_code = dict(zip(codes, cells))
        return {"codes": codes, "words": [by_code[code] for code in range(len(words))]}
    return {"cells": cells}


def _cell(cell: Any) -> Any:
    if isinstance(cell, float):
        return _rounded(cell)
    if isinstance(cell, str):
        return _shortened(cell, CELL_CHARACTERS)
    return _plain(cell)


def _plain(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _shortened(value, CELL_CHARACTERS)
    return _rounded(value) if isinstance(value, float) else value


def _rounded(value: float | None) -> float | None:
    """The value with six significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _shortened(text: str, most: int) -> str:
    """The text's head and tail, about `most` characters."""
    if len(text) <= most:
        return text
    head, tail = most - most // 3, most // 3
    return f"{text[:head]} [... {len(text) - head - tail:,} characters ...] {text[len(text) - tail :]}"
