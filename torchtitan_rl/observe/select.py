"""Selects the rows of a table to show. A selector ranks rows; the config names and combines selectors.

Each rank sends only the rows its own selectors chose, with their groups. The same selectors, applied to what all ranks
sent, give the same result as on the pooled rows.
"""

import hashlib
import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import load_function
from torchtitan_rl.observe.sample_rows import Row, as_score, score_of
from torchtitan_rl.observe.tokens import without_tokens
from torchtitan_rl.text import plain

UNSCORED_SHOWN = 2
"""Rows without a usable score to show in each step, unless the config has its own "unscored:k"."""
PINNED_SHOWN = 64
"""Largest number of rows that one "pinned:TEXT" selects in a step."""
CUT = ("length", "max_tokens", "max_turns", "max_traces", "time")
"""Finish reasons of completions that a limit has cut."""
HELD_OUT_SPLIT = "eval_greedy"
SIBLING = "sibling"
"""`select_reason` of rows that are stored because another sample of their prompt is shown."""

Choose = Callable[[list[Row]], list[Row]]
Value = Callable[[Row], float | None]
"""What a selector ranks by; None leaves the row out."""


def highest(k: int, value: Value) -> Choose:
    """The k rows with the highest value. Of equal values, those that do not affect training come last."""

    def choose(rows: list[Row]) -> list[Row]:
        ranked = [(v, row) for row in rows if (v := value(row)) is not None]
        ranked = heapq.nsmallest(k, ranked, key=lambda p: (-p[0], _is_idle(p[1]), _hash(p[1])))
        return [row for _, row in ranked]

    return choose


def in_each_group(choose: Choose) -> Choose:
    """Applies `choose` to each prompt's rows separately."""
    return lambda rows: [row for group in _groups(rows) for row in choose(group)]


def zero_variance(k: int) -> Choose:
    """One row from each of k groups that have at least two scores, all equal."""

    def choose(rows: list[Row]) -> list[Row]:
        scored = [[row for row in g if score_of(row) is not None] for g in _groups(rows)]
        equal = [g for g in scored if len(g) > 1 and len(set(map(score_of, g))) == 1]
        return heapq.nsmallest(k, (min(group, key=_hash) for group in equal), key=_hash)

    return choose


def random(k: int) -> Choose:
    """A seeded random sample of k rows."""
    return lambda rows: heapq.nsmallest(k, rows, key=lambda row: _hash(row)[::-1])


def where(condition: Callable[[Row], bool]) -> Value:
    """The value of a selector that takes any rows with this property."""
    return lambda row: 0.0 if condition(row) else None


def column(name: str) -> Value:
    """The number in a column of the row."""
    return lambda row: as_score(row.get(name))


def lowest_first(value: Value) -> Value:
    return lambda row: None if (v := value(row)) is None else -v


def length(row: Row) -> float | None:
    """Response tokens, or characters if a row has no token count."""
    tokens = as_score(row.get("response_tokens"))
    if tokens is None and "response" in row:
        return float(len(str(row["response"])))
    return tokens


SELECTORS: dict[str, Callable[[int], Choose]] = {
    "top": lambda k: highest(k, score_of),
    "bottom": lambda k: highest(k, lowest_first(score_of)),
    "random": random,
    "longest": lambda k: highest(k, length),
    "truncated": lambda k: highest(k, where(lambda row: row.get("finish_reason") in CUT)),
    "failed": lambda k: highest(k, where(lambda row: row.get("answer", "absent") is None)),
    "unscored": lambda k: highest(k, where(lambda row: score_of(row) is None)),
    "zero_variance": zero_variance,
    "group_best": lambda k: in_each_group(highest(k, score_of)),
    "group_worst": lambda k: in_each_group(highest(k, lowest_first(score_of))),
}
"""The selectors that `select` may name, besides "pinned:TEXT" and a user's function."""


def parse_selector(text: str) -> tuple[str, Choose]:
    """Parses "name:k", such as "top:2", "top:2:COLUMN", "pinned:TEXT", or a user's "path/to/file.py:function:k". Without ":k", k is 1.

    Returns the name shown in `select_reason`, and the selector. Raises UserError for an unknown name, or a wrong k.
    """
    name, _, argument = text.partition(":")
    if "." in name:
        place, _, last = text.rpartition(":")
        reference, k = (place, last) if last.isdecimal() else (text, "1")
        value = guarded(load_function(reference, "metrics.select"), text)
        return reference.rpartition(":")[2], highest(int(k), value)
    if name == "pinned" and argument:
        in_prompt = where(lambda row: argument in str(row.get("prompt", "")))
        return name, highest(PINNED_SHOWN, in_prompt)
    k, _, of_column = argument.partition(":")
    expected = f"one of {', '.join(SELECTORS)} with a number of rows, or pinned:TEXT"
    remedy = "Example: --metrics.select top:2 bottom:1. See docs/observability.md."
    holds = (
        name in SELECTORS
        and (not argument or k.isdecimal())
        and (not of_column or name in ("top", "bottom"))
    )
    expect(holds, "metrics.select", text, expected, remedy)
    if of_column:
        value = column(of_column)
        choose = highest(int(k), value if name == "top" else lowest_first(value))
        return f"{name} {of_column}", choose
    return name.replace("_", " "), SELECTORS[name](int(k or 1))


def guarded(function: Callable[[Row], Any], text: str) -> Value:
    """A user's function of a row. Its first error is logged; from then on it ranks nothing, so no step's rows are lost by it."""
    failed = False

    def value(row: Row) -> float | None:
        nonlocal failed
        if failed:
            return None
        try:
            return as_score(plain(function(dict(row))))
        except Exception:
            failed = True
            fault = f"metrics.select = {text!r}: it ranks no row from here on"
            logging.getLogger(__name__).warning(fault, exc_info=True)
            return None

    return value


class Selection:
    """All selectors of the config. Each split has its own selection."""

    def __init__(
        self,
        select: Sequence[str],
        keep_all: bool = False,
        complete: Callable[[Row], Row] = lambda row: row,
    ) -> None:
        """`complete` fills in what takes long to compute, in the few rows to store. Raises UserError for an invalid selector."""
        self._complete = complete
        self._selectors = [parse_selector(text) for text in select]
        if not any(reason == "unscored" for reason, _ in self._selectors):
            self._selectors.append(parse_selector(f"unscored:{UNSCORED_SHOWN}"))
        self._keep_all = keep_all

    def select(self, rows: list[Row]) -> list[Row]:
        """The rows to store: those that selectors chose, with their reasons, and their siblings without tokens.

        With `keep_all`, and in the greedy evaluation, all others too, with the reason "": every held-out prompt can then
        be followed over training. Ordered by split, then by descending score. Each rank selects from its own rows, and
        rank 0 from what all ranks selected.
        """
        stored: list[Row] = []
        for split, members in sorted(_by(lambda row: str(row.get("split")), rows).items()):
            reasons: dict[int, list[str]] = {id(row): [] for row in members}
            for reason, choose in self._selectors:
                for row in choose(members):
                    reasons[id(row)].append(reason)
            shown_groups = {_group(row) for row in members if reasons[id(row)]} - {None}
            for row in sorted(members, key=_rank):
                reason = ", ".join(reasons[id(row)])
                keeps = self._keep_all or split == HELD_OUT_SPLIT
                if not (reason or keeps or _group(row) in shown_groups):
                    continue
                row = self._complete(row)
                if not reason:
                    row = without_tokens(row)
                    reason = "" if keeps else SIBLING
                stored.append({**row, "select_reason": reason})
        return stored


def _by(key: Callable[[Row], Any], rows: list[Row]) -> dict[Any, list[Row]]:
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts


def _group(row: Row) -> int | None:
    return row["prompt_idx"] if isinstance(row.get("prompt_idx"), int) else None


def _groups(rows: list[Row]) -> list[list[Row]]:
    return [members for group, members in _by(_group, rows).items() if group is not None]


def _place(row: Row) -> tuple[Any, ...]:
    """prompt_idx and sample_idx. Rows without them come later, ordered by their content."""
    place = (0, row.get("prompt_idx"), row.get("sample_idx"))
    if all(isinstance(index, int) for index in place):
        return place
    return 1, _digest(repr(sorted({**row, "select_reason": ""}.items())))


def _rank(row: Row) -> tuple[Any, ...]:
    """Orders rows by descending score, those without one last."""
    score = score_of(row)
    return score is None, -(score or 0.0), _place(row)


def _is_idle(row: Row) -> bool:
    """Whether the row does not affect training: advantage 0, or not in the loss."""
    return "advantage" in row and not (row["advantage"] and row.get("in_loss", True))


def _hash(row: Row) -> bytes:
    """Breaks ties. The order it gives differs between steps, and is equal in every run and on every rank."""
    return _digest(f"0:{row.get('step')}:{_place(row)}")


def is_shown(row: Row) -> bool:
    """Whether a selector has chosen the stored row."""
    return row["select_reason"] not in ("", SIBLING)


def shown(rows: Sequence[Row]) -> list[Row]:
    """The stored rows that selectors have chosen, without their tokens."""
    return [without_tokens(row) for row in rows if is_shown(row)]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).digest()
