"""Builds the page: one HTML file with the run as JSON data and the scripts. It loads nothing else."""

import base64
import hashlib
import html
import json
import math
import os
import time
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from torchtitan_rl.report.ending import ending
from torchtitan_rl.report.health import health
from torchtitan_rl.report.load import Row, Run, load_run
from torchtitan_rl.report.verdicts import time_by_phase, verdicts

CELL_CHARACTERS = 20_000
"""Longer texts are shortened to head and tail."""
SIZE_MB = 5.0
"""Default maximum size of the page. Samples that would exceed it are left out."""
MIN_ROW_BYTES = 500_000
"""Bytes that samples may always use, however large the metrics are."""

_SCRIPTS = (
    "base.js",
    "charts.js",
    "overview.js",
    "samples.js",
    "sample.js",
    "prompts.js",
    "health.js",
    "app.js",
)
_NOTICE = b"<noscript>This report needs JavaScript."
"""The text by which a page is known."""
_LEFT_OUT = frozenset(("run_id", "episode_id", "score"))
_PROMPT_COLUMNS = ("table", "split", "step", "prompt_idx")
_ID_COLUMNS = ("split", "step", "prompt_idx", "sample_idx")
_NAME = "page/name"
"""A column of the page's own: the row's name in links, if it is not made of `_ID_COLUMNS`."""


def write_report(folder: Path, output: Path, *, size_mb: float | None = None) -> Run:
    """Writes the report of the run in `folder` to `output` and returns the run. The file is replaced at once, so that nobody reads half of it.

    Args:
        size_mb: maximum size of the page. If samples do not fit, it has the selected ones first, then randomly chosen whole groups.
            None: `SIZE_MB`, or more if the metrics leave no room for samples.

    Raises: FileNotFoundError for a folder that is not a run; FileExistsError for another file of the user's in the place of the page;
    OSError if it cannot be written; ValueError if `size_mb` is less than the page needs.
    """
    run = load_run(folder)
    page = render(run, size_mb=size_mb)
    _expect_own(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _replace(output, page)
    return run


def _expect_own(path: Path) -> None:
    """Raises FileExistsError if there is anything but a file that this module has written, or an empty one."""
    if os.path.lexists(path) and not (path.is_file() and (not path.stat().st_size or _is_own(path))):
        raise FileExistsError(
            f"--output = {str(path)!r}: expected a new file or an earlier report, but it is something else. Name another file."
        )


def _is_own(path: Path) -> bool:
    with open(path, "rb") as file:
        return _NOTICE in file.read(2**17)  # it follows the style


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    # A lone surrogate becomes \udxxx, as in JSON.
    unfinished.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(unfinished, path)


def render(run: Run, *, size_mb: float | None = None) -> str:
    """Returns the page as HTML. Arguments and errors: see `write_report`."""
    asset = resources.files(__package__).joinpath("assets")
    style = "\n".join(asset.joinpath(name).read_text("utf-8") for name in ("uplot-1.6.32.min.css", "report.css"))
    scripts = "\n".join(asset.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    plot = asset.joinpath("uplot-1.6.32.min.js").read_text("utf-8")
    licence = asset.joinpath("uplot-LICENSE.txt").read_text("utf-8").strip()
    code = f"/*\nuPlot 1.6.32\n{licence}\n*/\n{plot}\n(() => {{\n'use strict';\n{scripts}\n}})();"
    described = _described(run)
    fixed = len(code) + len(style) + _size(described)
    asked = int((SIZE_MB if size_mb is None else size_mb) * 1e6)
    budget = max(MIN_ROW_BYTES, asked - fixed)
    rows, left = _rows_within(run, budget)
    size = _size(rows)
    if size_mb is not None and asked < fixed + min(size, MIN_ROW_BYTES):
        least = math.ceil((fixed + min(size, MIN_ROW_BYTES)) / 1e5) / 10
        raise ValueError(
            f"--size {size_mb:g}: expected at least {least:g} MB, for scripts, metrics and the first samples"
        )
    if size > budget:  # rows were estimated too small: much markup
        rows, left = _rows_within(run, int(budget * budget / size))
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    content = {"made": made, "left": left, "run": described, "rows": rows}
    parts = {
        "title": html.escape(run.name),
        "hash": base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        "style": style,
        "data": embed(content),
        "code": code,
    }
    page = asset.joinpath("report.html").read_text("utf-8")
    pieces = [parts.get(piece, piece) if place % 2 else piece for place, piece in enumerate(page.split("%%"))]
    return "".join(pieces)


def embed(value: Any) -> str:
    """The value as JSON that cannot end its script tag: <, >, & and JavaScript's line separators are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _size(value: Any) -> int:
    """Bytes of the value in the page."""
    return len(embed(value).encode("utf-8", "replace"))


def _described(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "total": run.total_steps,
        "demonstrated": run.demonstrated,
        "stored": run.num_stored_rows,
        "about": list(_about(run)),
        "charts": [_own_chart(text) for text in run.setting("metrics.charts") or ()],
        "series": {key: [_rounded(value) for value in values] for key, values in sorted(run.series.items())},
        "ending": _plain(ending(run)),
        "time": {name: _rounded(seconds) for name, seconds in time_by_phase(run).items()},
        "verdicts": [line._asdict() for line in verdicts(run)],
        "health": _plain(health(run)),
        "config": {key: _plain(value) for key, value in flat(run.config).items()},
        "environment": {key: _plain(value) for key, value in flat(run.environment).items()},
    }


def _about(run: Run) -> Iterator[str]:
    """What was trained, on what and how, as far as the config says. Example: "model SmolLM2-135M", "lr 1e-05", "bfloat16"."""
    if folder := run.setting("hf_assets_path"):
        yield f"model {Path(folder).name}"
    if task := run.setting("task.class"):
        data = run.setting("task.path")
        yield f"data {Path(data).name}" if data else f"task {task.rpartition(':')[2]}"
    if prompts := run.setting("num_prompts_per_step"):
        yield f"{prompts} prompts × {run.setting('sampling.n')} completions a step"
    if lr := run.setting("trainer.optimizer.lr"):
        yield f"learning rate {lr:g}"
    if rank := run.setting("trainer.lora.rank"):
        yield f"LoRA rank {rank}"
    dtypes = (run.setting("trainer.mixed_precision_param"), run.setting("generator.dtype"))
    yield " and ".join(dict.fromkeys(str(dtype) for dtype in dtypes if dtype))


def _own_chart(text: str) -> dict[str, Any]:
    """A chart of `metrics.charts`, in the form of overview.js's FIRST."""
    title, _, keys = text.partition("=")
    return {"title": title, "keys": [[key, key] for key in keys.split(",")]}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts, joining keys by dots. Example: {"a": {"b": 1}} becomes {"a.b": 1}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _rows_within(run: Run, budget: int) -> tuple[dict[str, Any], int]:
    """The rows that fit into so many bytes, as {"count": rows, "columns": columns}, and the number of those that do not."""
    kept = _within(run.rows, budget)
    part = [row for place, row in enumerate(run.rows) if place in kept]
    return {"count": len(part), "columns": _columns(part)}, len(run.rows) - len(part)


def _within(rows: list[Row], budget: int) -> set[int]:
    """The places of the rows that fit into the budget, by whole groups: first those of a failed step, then those with selected rows, of
    each split's last step before others, and the rest by a hash."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    last: dict[Any, int] = {}
    for place, row in enumerate(rows):
        groups.setdefault(_group(row), []).append(place)
        last[row.get("split")] = max(last.get(row.get("split"), 0), row.get("step") or 0)

    def urgency(places: list[int]) -> tuple[bool, bool, bool, int]:
        unfinished, selected = (
            any(rows[place].get(column) for place in places) for column in ("unfinished", "select_reason")
        )
        row = rows[places[0]]
        newest = selected and row.get("step") == last[row.get("split")]
        return not unfinished, not newest, not selected, zlib.crc32(repr(_group(row)).encode())

    kept: set[int] = set()
    seen: set[tuple[str, str]] = set()
    for places in sorted(groups.values(), key=urgency):
        budget -= sum(_bytes(rows[place], seen) for place in places)
        if budget >= 0:
            kept.update(places)
    return kept


def _group(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(column)) for column in _PROMPT_COLUMNS)


def _bytes(row: Row, seen: set[tuple[str, str]]) -> int:
    """Estimates the bytes that the row adds to the file. A text that its column already has is stored as a number."""
    size = 0
    for column, cell in row.items():
        size += len(json.dumps(cell)) if isinstance(cell, (dict, list)) else 7
        if isinstance(cell, str) and (column, cell) not in seen:
            seen.add((column, cell))
            size += min(len(cell.encode("utf-8", "replace")), CELL_CHARACTERS)
    return size


def _columns(rows: list[Row]) -> dict[str, Any]:
    """Columns by name: {"same": cell}, {"codes": [...], "words": [...]} if cells repeat, or {"cells": [...]}."""
    names = dict.fromkeys(column for row in rows for column in row if column not in _LEFT_OUT)
    found = {_NAME: _packed([_name(row) for row in rows])}
    for name in names:
        found[name] = _packed([_plain(row.get(name)) for row in rows])
    return found


def _name(row: Row) -> str | None:
    """The row's name in links; None if the page makes it of other columns."""
    usual = "/".join(str(row.get(column)) for column in _ID_COLUMNS)
    return None if row["episode_id"] == usual else row["episode_id"]


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
