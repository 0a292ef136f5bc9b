"""Other people's text and values, made safe to keep and to show."""

from typing import Any

PLAIN = frozenset((str, bool, float, type(None)))
"""Types that are plain as they are."""

MAX_DEPTH = 10
"""Levels of nesting that are kept; what lies deeper becomes text. A list that holds itself has no other end."""


def plain(cell: Any, depth: int = MAX_DEPTH) -> Any:
    """The cell as something every sink can hold: None, bool, int of 64 bits, float, str, or lists and dicts of them.

    Tensors and arrays become numbers or lists; anything else becomes its text. Never raises.
    """
    if type(cell) in PLAIN:
        return cell
    try:
        if isinstance(cell, int):
            return int(cell) if -(2**63) <= cell < 2**63 else str(cell)
        if isinstance(cell, str):
            return str.__str__(cell)
        if isinstance(cell, dict) and depth:
            return {str(key): plain(value, depth - 1) for key, value in cell.items()}
        if isinstance(cell, (list, tuple)) and depth:
            return [plain(value, depth - 1) for value in cell]
        return plain(cell.tolist()) if hasattr(cell, "tolist") else str(cell)
    except Exception as error:
        return f"<{type(cell).__name__} that cannot be shown: {type(error).__name__}>"


def utf8(text: str) -> str:
    """The text with lone surrogates as \\ud800 escapes: every other character as it is, and encodable as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def head_and_tail(text: str, most: int) -> str:
    """At most about `most` characters of the text, from both its ends, saying how many are left out."""
    if len(text) <= most:
        return text
    head, tail = most - most // 3, most // 3
    left_out = len(text) - head - tail
    return f"{text[:head]} [... {left_out:,} characters ...] {text[len(text) - tail :]}"
