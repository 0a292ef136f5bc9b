"""Converts cells and model output to text that a table, terminal or file can hold."""

import json
from typing import Any


def utf8(text: str) -> str:
    """The text with lone surrogates as \\ud800 escapes: every other character as it is, and encodable as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def flat_cell(cell: Any) -> Any:
    """The cell for a table without nesting: lists and dicts as JSON text, text that UTF-8 can encode."""
    if isinstance(cell, str):
        return utf8(cell)
    if isinstance(cell, (list, dict)):
        return utf8(json.dumps(cell, ensure_ascii=False))
    return cell


def head_and_tail_lines(text: str, most: int) -> str:
    """The text's head and tail in at most `most` lines, including one with the number of omitted lines."""
    lines = text.split("\n")
    if len(lines) <= most:
        return text
    head = (most - 1) - (most - 1) // 3
    tail = most - 1 - head
    left_out = len(lines) - head - tail
    return "\n".join([*lines[:head], f"[... {left_out:,} lines ...]", *lines[len(lines) - tail :]])


def compact_number(value: Any) -> str:
    """A number in about seven characters; "-" for None; any other cell as its text."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{int(value):,}" if abs(value) < 1e15 and value == int(value) else f"{value:.4g}"
