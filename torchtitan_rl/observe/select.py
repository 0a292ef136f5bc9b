"""Selects the rows of a table to show. A selector ranks rows; the config names and combines selectors.

Each rank sends only the rows its own selectors chose, with their groups. The same selectors, applied to all ranks'
candidates, give the same result as on the pooled rows.
"""

import hashlib
import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import load_function
from torchtitan_rl.observe.sample_rows import Row, as_score, score_of
from torchtitan_rl.observe.tokens import TOKENS

UNSCORED_SHOWN = 2
"""Rows without a usable score to show in each step, unless the config has its own "unscored:k"."""
PINNED_SHOWN = 64
"""Largest number of rows that one "pinned:TEXT" selects in a step."""
CUT = ("length", "max_tokens", "max_turns", "max_traces", "time")
"""Finish reasons of completions that a limit has cut."""
HELD_OUT_SPLIT = "eval_greedy"
SIBLING = "sibling"
"""`select_reason` of rows that are stored because another sample of their prompt is shown."""


class Candidate(NamedTuple):
    """A row with the values that selectors use."""

    row: Row
    score: float | None
    """The value it is ranked by; None: it is not ranked."""
    group: int | None
    """The prompt's index, if any."""
    place: tuple[Any, ...]
    """prompt_idx and sample_idx. Rows without them come later, ordered by their content."""
    idle: bool
    """True if the row does not affect training (advantage 0, or not in the loss). Of equal rank, it comes last."""
    tie_breaker: bytes
    """A hash. The order it gives differs between steps, and is equal in every run and on every rank."""


Choose = Callable[[list[Candidate]], list[Candidate]]
Value = Callable[[Candidate], float | None]
"""What a selector ranks by; None leaves the row out."""


def highest(k: int, value: Value) -> Choose:
    """The k candidates with the highest value."""

    def choose(candidates: list[Candidate]) -> list[Candidate]:
        ranked = [(v, c) for c in candidates if (v := value(c)) is not None]
        ranked = heapq.nsmallest(k, ranked, key=lambda p: (-p[0], p[1].idle, p[1].tie_breaker))
        return [c for _, c in ranked]

    return choose


def in_each_group(choose: Choose) -> Choose:
    """Applies `choose` to each prompt's rows separately."""
    return lambda candidates: [c for group in _groups(candidates) for c in choose(group)]


def zero_variance(k: int) -> Choose:
    """One row from each of k groups that have at least two scores, all equal."""

    def choose(candidates: list[Candidate]) -> list[Candidate]:
        scored = [[c for c in group if c.score is not None] for group in _groups(candidates)]
        equal = [g for g in scored if len(g) > 1 and len({c.score for c in g}) == 1]
        firsts = [min(group, key=lambda c: c.tie_breaker) for group in equal]
        return heapq.nsmallest(k, firsts, key=lambda c: c.tie_breaker)

    return choose


def random(k: int) -> Choose:
    """A seeded random sample of k rows."""
    return lambda candidates: heapq.nsmallest(k, candidates, key=lambda c: c.tie_breaker[::-1])


def where(condition: Callable[[Candidate], bool]) -> Value:
    """The value of a selector that takes any rows with this property."""
    return lambda c: 0.0 if condition(c) else None


def column(name: str) -> Value:
    """The number in a column of the row."""
    return lambda c: as_score(c.row.get(name))


def lowest_first(value: Value) -> Value:
    return lambda c: None if (v := value(c)) is None else -v


def score(c: Candidate) -> float | None:
    return c.score


def length(c: Candidate) -> float | None:
    """Response tokens, or characters if a row has no token count."""
    tokens = as_score(c.row.get("response_tokens"))
    if tokens is None and "response" in c.row:
        return float(len(str(c.row["response"])))
    return tokens


SELECTORS: dict[str, Callable[[int], Choose]] = {
    "top": lambda k: highest(k, score),
    "bottom": lambda k: highest(k, lowest_first(score)),
    "random": random,
    "longest": lambda k: highest(k, length),
    "truncated": lambda k: highest(k, where(lambda c: c.row.get("finish_reason") in CUT)),
    "failed": lambda k: highest(k, where(lambda c: c.row.get("answer", "absent") is None)),
    "unscored": lambda k: highest(k, where(lambda c: c.score is None)),
    "zero_variance": zero_variance,
    "group_best": lambda k: in_each_group(highest(k, score)),
    "group_worst": lambda k: in_each_group(highest(k, lowest_first(score))),
}
"""The selectors that `select` may name, besides "pinned:TEXT" and a user's function."""


class Selector(NamedTuple):
    """One entry of `metrics.select`."""

    reason: str
    """The name shown in `select_reason`."""
    choose: Choose


def parse_selector(text: str) -> Selector:
    """Parses "name:k", such as "top:2", "top:2:COLUMN", "pinned:TEXT", or a user's "path/to/file.py:function:k". Without ":k", k is 1.

    Raises: UserError for an unknown name, or a k that is not a whole number from 0 up.
    """
    name, _, argument = text.partition(":")
    if "." in name:
        place, _, last = text.rpartition(":")
        reference, k = (place, last) if last.isdecimal() else (text, "1")
        value = guarded(load_function(reference, "metrics.select"), text)
        return Selector(reference.rpartition(":")[2], highest(int(k), value))
    if name == "pinned" and argument:
        in_prompt = where(lambda c: argument in str(c.row.get("prompt", "")))
        return Selector(name, highest(PINNED_SHOWN, in_prompt))
    k, _, of_column = argument.partition(":")
    expect(
        name in SELECTORS
        and (not argument or k.isdecimal())
        and (not of_column or name in ("top", "bottom")),
        "metrics.select",
        text,
        f"one of {', '.join(SELECTORS)} with a number of rows, or pinned:TEXT",
        "Example: --metrics.select top:2 bottom:1. See docs/observability.md.",
    )
    if of_column:
        value = column(of_column)
        choose = highest(int(k), value if name == "top" else lowest_first(value))
        return Selector(f"{name} {of_column}", choose)
    return Selector(name.replace("_", " "), SELECTORS[name](int(k or 1)))


def guarded(function: Callable[[Row], Any], text: str) -> Value:
    """A user's function of a row. Its first error is logged; from then on it ranks nothing, so no step's rows are lost by it."""
    failed = False

    def value(c: Candidate) -> float | None:
        nonlocal failed
        if failed:
            return None
        try:
            return as_score(function(dict(c.row)))
        except Exception:
            failed = True
            logging.getLogger(__name__).warning(
                "metrics.select = %r: it ranks no row from here on", text, exc_info=True
            )
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
        """
        Args:
            complete: called with the candidates, which are few; fills in what takes long to compute.

        Raises: UserError for an invalid selector.
        """
        self._complete = complete
        self._selectors = [parse_selector(text) for text in select]
        if not any(selector.reason == "unscored" for selector in self._selectors):
            self._selectors.append(parse_selector(f"unscored:{UNSCORED_SHOWN}"))
        self._keep_all = keep_all

    def candidates(self, rows: list[Row]) -> list[Row]:
        """This rank's rows that the selection over all ranks may need."""
        needed = []
        for members in self._splits(rows):
            selected = [c for selector in self._selectors for c in selector.choose(members)]
            with_tokens = {id(c) for c in selected}
            siblings = _siblings(members, selected)
            for c in members:
                if id(c) in with_tokens:
                    needed.append(self._complete(c.row))
                elif id(c) in siblings or self._stores(c.row):
                    needed.append(_without_tokens(self._complete(c.row)))
        return needed

    def _stores(self, row: Row) -> bool:
        """Whether the row is stored even if no selector chooses it: every held-out prompt can then be followed over training."""
        return self._keep_all or row.get("split") == HELD_OUT_SPLIT

    def select(self, rows: list[Row], step: int) -> list[Row]:
        """The rows to store, of the candidates of all ranks: those that selectors chose, with their reasons, and their siblings.

        With `keep_all`, and in the greedy evaluation, all others too, with the reason "". Ordered by split, then by
        descending score.
        """
        stored: list[Row] = []
        for members in self._splits(rows):
            reasons: dict[int, list[str]] = {id(c): [] for c in members}
            for selector in self._selectors:
                for c in selector.choose(members):
                    reasons[id(c)].append(selector.reason)
            siblings = _siblings(members, [c for c in members if reasons[id(c)]])
            members.sort(key=lambda c: (c.score is None, -(c.score or 0.0), c.place))
            for c in members:
                row = {**c.row, "step": step, "select_reason": ", ".join(reasons[id(c)])}
                if reasons[id(c)]:
                    stored.append(row)
                elif self._stores(row):
                    stored.append(_without_tokens(row))
                elif id(c) in siblings:
                    stored.append({**_without_tokens(row), "select_reason": SIBLING})
        return stored

    def _splits(self, rows: list[Row]) -> list[list[Candidate]]:
        splits: dict[str, list[Candidate]] = {}
        for row in rows:
            splits.setdefault(str(row.get("split")), []).append(self._candidate(row))
        return [members for _, members in sorted(splits.items())]

    def _candidate(self, row: Row) -> Candidate:
        prompt_idx, sample_idx = row.get("prompt_idx"), row.get("sample_idx")
        group = prompt_idx if isinstance(prompt_idx, int) else None
        known = group is not None and isinstance(sample_idx, int)
        place = (0, group, sample_idx) if known else (1, _digest(repr(sorted(row.items()))))
        return Candidate(
            row=row,
            score=score_of(row),
            group=group,
            place=place,
            idle="advantage" in row and not (row["advantage"] and row.get("in_loss", True)),
            tie_breaker=_digest(f"0:{row.get('step')}:{place}"),
        )


def _groups(candidates: list[Candidate]) -> list[list[Candidate]]:
    groups: dict[int, list[Candidate]] = {}
    for c in candidates:
        if c.group is not None:
            groups.setdefault(c.group, []).append(c)
    return list(groups.values())


def _siblings(members: list[Candidate], chosen: list[Candidate]) -> set[int]:
    """The ids of the members of the groups of the chosen candidates."""
    groups = {c.group for c in chosen} - {None}
    return {id(c) for c in members if c.group in groups}


def is_shown(row: Row) -> bool:
    """Whether a selector has chosen the stored row."""
    return row["select_reason"] not in ("", SIBLING)


def shown(rows: Sequence[Row]) -> list[Row]:
    """The stored rows that selectors have chosen, without their tokens."""
    return [_without_tokens(row) for row in rows if is_shown(row)]


def _without_tokens(row: Row) -> Row:
    """The row without its tokens, which only the store keeps, and only for shown rows."""
    return {column: cell for column, cell in row.items() if column != TOKENS}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).digest()
