"""Text and values from other people's code, made safe to keep and to show."""

import re
from collections.abc import Callable, Iterator
from typing import Any

PLAIN = frozenset((str, bool, float, type(None)))
"""Types that need no conversion."""

MAX_DEPTH = 10
"""Levels of nesting that are kept; deeper values become text. This also ends a list that contains itself."""

_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, separators of lines and paragraphs, and characters that reverse the direction of the text after them."""


def plain(cell: Any, depth: int = MAX_DEPTH) -> Any:
    """The cell as a type that every sink can store: None, bool, 64-bit int, float, str, or lists and dicts of them.

    Tensors and arrays become numbers or lists; anything else becomes text. Never raises.
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


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts changed, but not the keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def strings(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict):
        for item in value.items():
            yield from strings(item)


def visible(text: str) -> str:
    """Untrusted text for a terminal: characters that it obeys become escapes such as \\x1b, but for newlines and tabs."""
    return _OBEYED.sub(
        lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n")
    )


def head_and_tail(text: str, most: int) -> str:
    """At most `most` characters: both ends of the text, and between them the number of characters that were left out.

    A limit of less than about 30 characters cuts the number too.
    """
    if len(text) <= most:
        return text
    note = f" [... {len(text):,} characters ...] "  # as long as the number of those left out, or longer
    kept = max(most - len(note), 0)
    tail = kept // 3
    return f"{text[: kept - tail]} [... {len(text) - kept:,} characters ...] {text[len(text) - tail :]}"[
        :most
    ]


def without_code_advice(message: str) -> str:
    """An error message of transformers in one line, without its advice to let a checkpoint's code run, for which there is no option."""
    return re.sub(
        r"[^.!?]*\btrust_remote_code\b[^.!?]*",
        " Code in a checkpoint's folder is not run",
        " ".join(message.split()),
    )
