"""Selects the rows of a table to show. A selector is a function of rows; the config names and combines selectors.

Each rank sends only the rows its own selectors chose. The same selectors, applied to all ranks' candidates, give the
same result as on the pooled rows. Rows that are equal in every column count as one row.
"""

import difflib
import hashlib
import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import load_function
from torchtitan_rl.observe.sample_rows import Row, as_score, score_of
from torchtitan_rl.observe.tokens import TOKENS
from torchtitan_rl.text import with_spaces

UNSCORED_SHOWN = 2
"""Rows without a usable score to show in each step, unless the config has its own "unscored:k"."""
PINNED_SHOWN = 64
"""Largest number of rows that one "pinned:TEXT" selects in a step."""


class Candidate(NamedTuple):
    """A row with the values that selectors use."""

    row: Row
    score: float | None
    """The value it is ranked by; None: it is not ranked."""
    reward: float | None
    """The reward, for the variance of its group; None without a score."""
    group: int | None
    """The prompt's index, if any."""
    place: tuple[Any, ...]
    """prompt_idx and sample_idx. Rows without them come later, ordered by their content."""
    idle: bool
    """True if the row does not affect training (advantage 0, or not in the loss). Of equal scores, it comes last."""
    tie_breaker: bytes
    """A hash. The order it gives differs between steps and seeds, and is equal in every run and on every rank."""


Choose = Callable[[list[Candidate]], list[Candidate]]


def first(
    k: int, key: Callable[[Candidate], Any], takes: Callable[[Candidate], bool] = lambda c: True
) -> Choose:
    """Selects the k candidates with the smallest `key` among those that `takes` accepts. O(log k) per row."""
    return lambda rows: heapq.nsmallest(
        k, filter(takes, rows), key=lambda c: (key(c), c.idle, c.tie_breaker)
    )


def any_of(takes: Callable[[Candidate], bool]) -> Callable[[int], Choose]:
    """A selector for k of the candidates that `takes` accepts."""
    return lambda k: first(k, lambda c: 0, takes)


def top(k: int) -> Choose:
    """The k rows with the highest score."""
    return first(k, lambda c: -c.score, lambda c: c.score is not None)


def bottom(k: int) -> Choose:
    """The k rows with the lowest score."""
    return first(k, lambda c: c.score, lambda c: c.score is not None)


def ranked(k: int, value: Callable[[Row], Any]) -> Choose:
    """The k rows with the highest `value`; rows for which it is no number are left out."""

    def choose(rows: list[Candidate]) -> list[Candidate]:
        values = {id(c): as_score(value(c.row)) for c in rows}
        return first(k, lambda c: -values[id(c)], lambda c: values[id(c)] is not None)(rows)

    return choose


def guarded(function: Callable[[Row], Any], text: str) -> Callable[[Row], Any]:
    """A user's function of a row, whose first error is logged and which then ranks nothing: a step's rows are not lost by it."""
    failed = False

    def value(row: Row) -> Any:
        nonlocal failed
        if failed:
            return None
        try:
            return function(dict(row))
        except Exception:
            failed = True
            logging.getLogger(__name__).warning(
                "metrics.select = %r: it ranks no row from here on", text, exc_info=True
            )
            return None

    return value


def random(k: int) -> Choose:
    """A seeded random sample of k rows."""
    return first(k, lambda c: c.tie_breaker[::-1])


def longest(k: int) -> Choose:
    """The k rows with the most response tokens, or characters if a row has no token count."""

    def length(c: Candidate) -> float:
        tokens = c.row.get("response_tokens")
        return tokens if isinstance(tokens, (int, float)) else len(str(c.row.get("response", "")))

    return first(
        k, lambda c: -length(c), lambda c: "response" in c.row or "response_tokens" in c.row
    )


def each_group(choose: Choose) -> Choose:
    """Applies `choose` to each prompt's rows separately."""
    return lambda rows: [c for group in _groups(rows) for c in choose(group)]


def zero_variance(k: int) -> Choose:
    """One row from each of k groups that have at least two rewards, all equal."""

    def choose(rows: list[Candidate]) -> list[Candidate]:
        ends = [_reward_ends(group) for group in _groups(rows)]
        alike = [pair[0] for pair in ends if len(pair) == 2 and pair[0].reward == pair[1].reward]
        return heapq.nsmallest(k, alike, key=lambda c: c.tie_breaker)

    return choose


def _groups(rows: list[Candidate]) -> list[list[Candidate]]:
    groups: dict[int, list[Candidate]] = {}
    for c in rows:
        if c.group is not None:
            groups.setdefault(c.group, []).append(c)
    return list(groups.values())


def _reward_ends(group: list[Candidate]) -> list[Candidate]:
    """The rows with the lowest and highest reward: enough to tell, over all ranks, whether all rewards are equal."""
    members = sorted(
        (c for c in group if c.reward is not None), key=lambda c: (c.reward, c.tie_breaker)
    )
    return [members[0], members[-1]] if len(members) > 1 else members


def pinned(text: str) -> Choose:
    """The rows whose prompt contains the text."""
    return any_of(lambda c: text in str(c.row.get("prompt", "")))(PINNED_SHOWN)


CUT = ("length", "max_tokens", "max_turns", "max_traces", "time")
"""Finish reasons of completions that a limit has cut."""

SELECTORS: dict[str, Callable[..., Choose]] = {
    "top": top,
    "bottom": bottom,
    "random": random,
    "longest": longest,
    "truncated": any_of(lambda c: c.row.get("finish_reason") in CUT),
    "failed": any_of(lambda c: c.row.get("answer", "absent") is None),
    "unscored": any_of(lambda c: c.score is None),
    "zero_variance": zero_variance,
    "group_best": lambda k: each_group(top(k)),
    "group_worst": lambda k: each_group(bottom(k)),
    "pinned": pinned,
}
"""The selectors that `select` may name. Each takes k; `pinned` takes a part of the prompt's text."""


class Selector(NamedTuple):
    """One entry of `metrics.select`."""

    reason: str
    """The name shown in `select_reason`."""
    choose: Choose
    candidates: Choose
    """Selects the rows that a rank sends for the selection over all ranks. For most selectors, the same as `choose`."""


def parse_selector(text: str) -> Selector:
    """Parses "name:k", such as "top:2", "top:2:COLUMN", "pinned:TEXT", or a user's "path/to/file.py:function:k". Without ":k", k is 1.

    Raises: UserError for an unknown name, or a k that is not a whole number from 0 up.
    """
    name, _, argument = text.partition(":")
    if "." in name:
        place, _, last = text.rpartition(":")
        reference, k = (place, last) if last.isdecimal() else (text, "1")
        choose = ranked(int(k), guarded(load_function(reference, "metrics.select"), text))
        return Selector(reference.rpartition(":")[2], choose, choose)
    near = difflib.get_close_matches(name, SELECTORS, 1)
    hint = f"Did you mean {near[0]!r}?" if near else "See docs/observability.md."
    if "," in text:
        hint = f"Put spaces between them: {with_spaces(text)}"
    expect(name in SELECTORS, "metrics.select", text, f"one of {', '.join(SELECTORS)}", hint)
    if name == "pinned":
        example = "Example: 'pinned:What is 12'."
        expect(argument, "metrics.select", text, "part of a prompt after the colon", example)
        return Selector(name, pinned(argument), pinned(argument))
    k, _, column = argument.partition(":")
    column_fits = not column or name in ("top", "bottom")
    expect(
        column_fits and (not argument or k.isdecimal()),
        "metrics.select",
        text,
        "a number of rows from 0 up after the colon",
        hint if "," in text else "Example: 'top:2'.",
    )
    if column:
        sign = 1 if name == "top" else -1
        choose = ranked(int(k), lambda row: _signed(row.get(column), sign))
        return Selector(f"{name} {column}", choose, choose)
    choose = SELECTORS[name](int(k or 1))
    candidates = each_group(_reward_ends) if name == "zero_variance" else choose
    return Selector(name.replace("_", " "), choose, candidates)


def _signed(value: Any, sign: int) -> float | None:
    number = as_score(value)
    return None if number is None else sign * number


HELD_OUT_SPLIT = "eval_greedy"
SIBLING = "sibling"
"""`select_reason` of rows that are stored because another sample of their prompt is shown."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The selected rows of a table, each with its `select_reason`, ordered by split, then by descending score."""

    shown: list[Row]
    kept: list[Row]
    """The rows to store: the shown rows with their siblings, those of the greedy evaluation, and with `keep_all` all others too
    (`select_reason` "" if no selector chose it)."""
    traces: list[Row]
    """The rows to show as conversations, `num_traces` of each split: the shown rows, then a seeded sample."""


class Selection:
    """All selectors of the config. Each split has its own selection."""

    def __init__(
        self,
        select: Sequence[str],
        seed: int = 0,
        keep_all: bool = False,
        num_traces: int = 0,
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
        self._seed, self._keep_all, self._num_traces = seed, keep_all, max(0, num_traces)

    def candidates(self, rows: list[Row]) -> list[Row]:
        """This rank's rows that the selection over all ranks may need."""
        chosen: set[int] = set()
        siblings: set[int] = set()
        for members in self._splits(rows):
            selected = [c for selector in self._selectors for c in selector.candidates(members)]
            chosen |= {id(c.row) for c in [*selected, *random(self._num_traces)(members)]}
            siblings |= {id(c.row) for c in _siblings(members, selected)}
        needed = []
        for row in rows:
            if id(row) in chosen:
                needed.append(self._complete(row))
            elif id(row) in siblings or self._stores(row):
                needed.append(_without_tokens(self._complete(row)))
        return needed

    def _stores(self, row: Row) -> bool:
        """Whether the row is stored even if no selector chooses it: every held-out prompt can then be followed over training."""
        return self._keep_all or row.get("split") == HELD_OUT_SPLIT

    def select(self, rows: list[Row], step: int) -> Selected:
        """Selects from the candidates of all ranks, in step `step`."""
        selected = Selected([], [], [])
        for members in self._splits(rows):
            reasons: dict[int, list[str]] = {id(c): [] for c in members}
            for selector in self._selectors:
                for c in selector.choose(members):
                    reasons[id(c)].append(selector.reason)
            siblings = {id(c) for c in _siblings(members, [c for c in members if reasons[id(c)]])}
            sampled = {id(c) for c in random(self._num_traces)(members)}
            shown, sampled_rows = [], []
            members.sort(key=lambda c: (c.score is None, -(c.score or 0.0), c.place))
            for c in members:
                row = {**c.row, "step": step, "select_reason": ", ".join(reasons[id(c)])}
                plain_row = _without_tokens(row)
                if reasons[id(c)]:
                    shown.append(plain_row)
                    selected.kept.append(row)
                elif self._stores(row):
                    selected.kept.append(plain_row)
                elif id(c) in siblings:
                    selected.kept.append({**plain_row, "select_reason": SIBLING})
                if id(c) in sampled and not reasons[id(c)]:
                    sampled_rows.append({**plain_row, "select_reason": "trace"})
            selected.shown.extend(shown)
            rollouts = [row for row in shown + sampled_rows if "response" in row]
            selected.traces.extend(rollouts[: self._num_traces])
        return selected

    def _splits(self, rows: list[Row]) -> list[list[Candidate]]:
        splits: dict[str, list[Candidate]] = {}
        for row in rows:
            splits.setdefault(str(row.get("split")), []).append(self._candidate(row))
        return [_distinct(members) for _, members in sorted(splits.items())]

    def _candidate(self, row: Row) -> Candidate:
        score, prompt_idx, sample_idx = score_of(row), row.get("prompt_idx"), row.get("sample_idx")
        reward = row.get("reward", score)
        group = prompt_idx if isinstance(prompt_idx, int) else None
        known = group is not None and isinstance(sample_idx, int)
        place = (0, group, sample_idx) if known else (1, _digest(_content(row)))
        return Candidate(
            row=row,
            score=score,
            reward=reward if isinstance(reward, (int, float)) and score is not None else None,
            group=group,
            place=place,
            idle="advantage" in row and not (row["advantage"] and row.get("in_loss", True)),
            tie_breaker=_digest(f"{self._seed}:{row.get('step')}:{place}"),
        )


def _siblings(members: list[Candidate], chosen: list[Candidate]) -> list[Candidate]:
    """The members of the groups of the chosen candidates."""
    groups = {c.group for c in chosen} - {None}
    return [c for c in members if c.group in groups]


def _without_tokens(row: Row) -> Row:
    """The row without its tokens, which only the store keeps, and only for shown rows."""
    return {column: cell for column, cell in row.items() if column != TOKENS}


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates without duplicates. Only candidates of the same place are compared by content."""
    places: dict[tuple[Any, ...], list[Candidate]] = {}
    for c in candidates:
        places.setdefault(c.place, []).append(c)
    distinct: list[Candidate] = []
    for twins in places.values():
        if len(twins) > 1:  # comparing contents of thousands of characters is slow
            contents = {_content(c.row): c for c in twins}
            twins = [contents[content] for content in sorted(contents)]
        distinct += twins
    return distinct


def _content(row: Row) -> str:
    """All columns as text, independent of their order."""
    return repr(sorted(row.items()))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).digest()
