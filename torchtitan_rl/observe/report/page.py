"""Builds the page: one HTML file with the run as JSON data and the scripts. It loads nothing else."""

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

from torchtitan_rl.observe.report.load import Row, Run, load_run
from torchtitan_rl.observe.report.overview import asked, ending, lines
from torchtitan_rl.text import head_and_tail

CELL_CHARACTERS = 20_000
"""Longer texts are shortened to head and tail."""
SIZE_MB = 5.0
"""Default maximum size of the page. Samples that would exceed it are left out."""
LARGEST_INTEGER = 2**53
"""JavaScript rounds larger integers."""
LEAST_ROWS_MB = 0.5
"""Size that samples may always have, however large the metrics are."""

_NOTICE = b"<noscript>This report needs JavaScript."
"""The text by which a page is known."""
_SCRIPTS = ("base", "charts", "overview", "samples", "sample", "prompts", "health", "app")
HELD_OUT = "eval_greedy"
"""The split of the greedy evaluation. All its samples are stored."""
_PROMPT_COLUMNS = ("run", "split", "table", "step", "prompt_idx")


def write_report(
    folder: Path, output: Path, *, others: Sequence[Path] = (), size_mb: float = SIZE_MB
) -> Run:
    """Writes the report of the run in `folder` to `output` and returns the run. The file is replaced at once, so that nobody reads half of it.

    Args:
        others: folders of runs that the page compares it with.
        size_mb: maximum size of the page. If samples do not fit, it has the selected ones first, then randomly chosen whole groups.
            They have `LEAST_ROWS_MB` also where scripts and metrics leave less.

    Raises: FileNotFoundError for a folder that is not a run; FileExistsError for another file of the user's in the place of the page;
    OSError if it cannot be written.
    """
    runs = [load_run(one) for one in (folder, *others)]
    if os.path.lexists(output) and not _is_page(output):
        expected = "expected a new file or an earlier report, but it is neither. Name another."
        raise FileExistsError(f"--output = {str(output)!r}: {expected}")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    # A lone surrogate becomes \\udxxx, as in JSON.
    unfinished.write_bytes(render(runs, size_mb=size_mb).encode("utf-8", "backslashreplace"))
    os.replace(unfinished, output)
    return runs[0]


def _is_page(path: Path) -> bool:
    """Whether there is a page that this module has written, or an empty file."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(2**17)  # the notice follows the style
    return not begin or _NOTICE in begin


def render(runs: Sequence[Run], *, size_mb: float = SIZE_MB) -> str:
    """Returns the page of one run, or of several that are compared, as HTML. Arguments: see `write_report`."""
    asset = resources.files(__package__).joinpath("assets")
    text = {file.name: file.read_text("utf-8") for file in asset.iterdir()}
    style = f"{text['uplot-1.6.32.min.css']}\n{text['report.css']}"
    scripts = "\n".join(text[f"{name}.js"] for name in _SCRIPTS)
    licence, plot = text["uplot-LICENSE.txt"].strip(), text["uplot-1.6.32.min.js"]
    code = f"/*\nuPlot 1.6.32\n{licence}\n*/\n{plot}\n(() => {{\n'use strict';\n{scripts}\n}})();"
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        names = [str(run.folder) for run in runs]
    described = [{"name": name, **_described(run)} for name, run in zip(names, runs)]
    stored = runs[0].rows
    if len(runs) > 1:  # a row's name in links tells it from other runs'
        stored = [
            row | {"run": name, "episode_id": f"{name}/{row['episode_id']}"}
            for name, run in zip(names, runs)
            for row in run.rows
        ]
    fixed = len(code) + len(style) + _size(described)
    rows = _rows_within(stored, max(1e6 * LEAST_ROWS_MB, 1e6 * size_mb - fixed))
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    content = {"made": made, "left": len(stored) - len(rows), "runs": described, "rows": rows}
    parts = {
        "title": html.escape(", ".join(names)),
        "hash": base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        "style": style,
        "data": embed(content),
        "code": code,
    }
    pieces = text["report.html"].split("%%")  # every second one is the name of a part
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def embed(value: Any) -> str:
    """The value as JSON that cannot end its script tag: <, >, & and JavaScript's line separators are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _size(value: Any) -> int:
    return len(embed(value).encode("utf-8", "replace"))


def _described(run: Run) -> dict[str, Any]:
    return {
        "steps": run.steps,
        "asked": asked(run),
        "resumes": run.resumes,
        "series": _plain(run.series),
        "ending": _plain(ending(run)),
        "lines": [line._asdict() for line in lines(run)],
        "notes": run.notes,
        "warnings": run.warnings,
        "config": _plain(flat(run.config)),
        "environment": _plain(flat(run.environment)),
    }


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts, joining keys by dots. Example: {"a": {"b": 1}} becomes {"a.b": 1}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def _rows_within(rows: Sequence[Row], budget: float) -> list[Row]:
    """The rows that fit into so many bytes, by whole groups: first those of a failed step, then those with selected rows, of each split's
    last step before others, with the held-out prompts at first and at last, and the rest by a hash."""
    groups: dict[tuple[str, ...], list[int]] = {}
    steps: dict[tuple[str, str], set[int]] = {}
    for place, row in enumerate(rows):
        name = tuple(str(row.get(column)) for column in _PROMPT_COLUMNS)
        groups.setdefault(name, []).append(place)
        steps.setdefault(name[:2], set()).add(row["step"])

    def urgency(name: tuple[str, ...]) -> tuple[bool, bool, bool, int]:
        members = [rows[place] for place in groups[name]]
        unfinished = any(row.get("unfinished") for row in members)
        selected = any(row.get("select_reason") for row in members)
        step, of_split = members[0]["step"], steps[name[:2]]
        at_end = step == max(of_split) and selected
        if name[1] == HELD_OUT:
            at_end = step in (min(of_split), max(of_split))
        return not unfinished, not at_end, not selected, zlib.crc32(repr(name).encode())

    fitting: dict[int, Row] = {}
    left = budget
    for name in sorted(groups, key=urgency):
        members = {place: _shown(rows[place]) for place in groups[name]}
        size = _size(list(members.values()))
        if size <= left:
            left -= size
            fitting |= members
        elif size < budget / 10:
            break  # nearly full; a group that is larger is passed over, as others may fit
    return [fitting[place] for place in sorted(fitting)]


def _shown(row: Row) -> Row:
    """The row's cells that the page shows; cells without a value are left out."""
    cells = {name: _plain(cell) for name, cell in row.items() if name != "run_id"}
    return {name: cell for name, cell in cells.items() if cell is not None}


def _plain(value: Any) -> Any:
    """The value with floats of six digits, and None for NaN and infinity, which JSON lacks; long texts shortened, and integers that
    JavaScript would round as texts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return head_and_tail(value, CELL_CHARACTERS)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return str(value) if isinstance(value, int) and abs(value) > LARGEST_INTEGER else value
