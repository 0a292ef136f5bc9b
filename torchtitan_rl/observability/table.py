"""A sample table on its way through one step: rows in, selected rows out, merged exactly over ranks."""

import math
from collections.abc import Sequence

from torchtitan_rl.observability.rows import EPISODE_COLUMNS, Row, plain_row
from torchtitan_rl.observability.select import UNSCORED_SHOWN, Entry, Place, Random, Selector, Unscored, parse_selector


class SelectedTable:
    """One table of one step. Rows of different splits never compete: each split has a selection of its own."""

    def __init__(
        self,
        select: Sequence[str] = ("top", "bottom", "random"),
        *,
        seed: int = 0,
        keep_all: bool = False,
        num_traces: int = 0,
    ) -> None:
        self._select, self._seed = tuple(select), seed
        self._keep_all, self._num_traces = keep_all, max(0, num_traces)
        self._splits: dict[str, _Split] = {}
        self.num_rows = 0
        """Rows offered, on all ranks merged so far."""
        self.num_without_score = 0
        """Rows with neither a score nor a reward."""

    def extend(self, rows: list[Row]) -> None:
        """Offers rows to every selector."""
        for row in rows:
            entry = Entry(plain_row(row))
            self.num_rows += 1
            self.num_without_score += entry.lacks_score
            self._split(str(entry.row.get("split"))).add(entry)

    def merge(self, other: "SelectedTable") -> None:
        """Takes in another rank's table of the same configuration."""
        for name, split in other._splits.items():
            self._split(name).merge(split)
        self.num_rows += other.num_rows
        self.num_without_score += other.num_without_score

    def rows(self) -> list[Row]:
        """The selected rows by split, in each the highest score first and those without one last, each row once."""
        return [row for _, split in sorted(self._splits.items()) for row in split.selected().rows()]

    def kept_rows(self) -> list[Row]:
        """With keep_all every row offered, each once, `select_reason` "" where no selector took it; else `rows()`."""
        return [row for _, split in sorted(self._splits.items()) for row in split.kept().rows()]

    def traces(self) -> list[Row]:
        """Rows to be shown as conversations: the selected ones first, then a seeded sample, `num_traces` in all."""
        rows = self.rows()
        for _, split in sorted(self._splits.items()):
            rows += [row for row in split.with_traces().rows() if row["select_reason"] == "trace"]
        return rows[: self._num_traces]

    def _split(self, name: str) -> "_Split":
        if name not in self._splits:
            self._splits[name] = _Split(self._select, self._seed, self._keep_all, self._num_traces)
        return self._splits[name]


class _Split:
    """The selectors of one split."""

    def __init__(self, select: Sequence[str], seed: int, keep_all: bool, num_traces: int) -> None:
        self._selectors: list[tuple[str, Selector]] = [parse_selector(text, seed) for text in select]
        if not any(reason == "unscored" for reason, _ in self._selectors):
            self._selectors.append(("unscored", Unscored(UNSCORED_SHOWN)))
        self._traces = Random(num_traces, seed)
        self._all: list[Entry] | None = [] if keep_all else None

    def add(self, entry: Entry) -> None:
        for _, selector in self._selectors:
            selector.add(entry)
        self._traces.add(entry)
        if self._all is not None:
            self._all.append(entry)

    def merge(self, other: "_Split") -> None:
        for (_, ours), (_, theirs) in zip(self._selectors, other._selectors, strict=True):
            for entry in theirs.candidates():
                ours.add(entry)
        for entry in other._traces.candidates():
            self._traces.add(entry)
        if self._all is not None and other._all is not None:
            self._all.extend(other._all)

    def selected(self) -> "_Distinct":
        found = _Distinct()
        for reason, selector in self._selectors:
            for entry in selector.entries():
                found.add(entry, reason)
        return found

    def kept(self) -> "_Distinct":
        found = self.selected()
        for entry in self._all or ():
            found.add(entry, None)
        return found

    def with_traces(self) -> "_Distinct":
        """The selected entries, then those taken for traces alone, whose one reason is "trace"."""
        found = self.selected()
        for entry in self._traces.entries():
            found.add(entry, "trace")
        return found


class _Distinct:
    """Entries without repetition, with the reasons that each was given."""

    def __init__(self) -> None:
        self._found: dict[Place, list[tuple[Entry, list[str]]]] = {}

    def add(self, entry: Entry, reason: str | None) -> None:
        """Adds the entry once; None gives no further reason."""
        twins = self._found.setdefault(entry.place, [])
        for known, reasons in twins:  # noqa: B007  (read after the break)
            if known == entry:
                break
        else:
            reasons = []
            twins.append((entry, reasons))
        if reason is not None and reason not in reasons:
            reasons.append(reason)

    def pairs(self) -> list[tuple[Entry, list[str]]]:
        """Each entry and its reasons, highest score first, those without a score last."""
        pairs = [pair for twins in self._found.values() for pair in twins]
        return sorted(pairs, key=_order)

    def rows(self) -> list[Row]:
        """The entries' rows in that order, each with its `select_reason`."""
        return [_with_reason(entry.row, ", ".join(reasons)) for entry, reasons in self.pairs()]


def _order(pair: tuple[Entry, list[str]]) -> tuple:
    entry = pair[0]
    return (not entry.scored, -entry.score if entry.scored else math.inf, entry.place, entry)


def _with_reason(row: Row, reason: str) -> Row:
    row = {**row, "select_reason": reason}
    return {column: row[column] for column in (*(c for c in EPISODE_COLUMNS if c in row), *row)}
