"""Converts cells and model output to text that a table, terminal or file can hold."""

import json
import re
import unicodedata
from typing import Any

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|\x9b[0-?]*[ -/]*[@-~]")
_HARMFUL = {"Cc", "Cf", "Zl", "Zp"}
"""Unicode categories: control, format (including direction overrides), line and paragraph separators."""
_KEPT = "\n\u200c\u200d"
"""Newline, and the joiners that emoji and some scripts need."""


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


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text without ANSI escapes, control characters and direction characters, safe for a terminal.

    Newlines stay, tabs become four spaces, and characters that `encoding` lacks become escapes.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\t", "    ")
    if not (text.isascii() and text.replace("\n", "").isprintable()):
        text = "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _HARMFUL)
    return text.encode(encoding, "backslashreplace").decode(encoding)


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
