"""A sample table on its way through one step: rows in, selected rows out, merged exactly over ranks."""

import math
from collections.abc import Sequence

from torchtitan_rl.observability.rows import EPISODE_COLUMNS, MISSING, Row, plain_row
from torchtitan_rl.observability.select import UNSCORED_SHOWN, Entry, Place, Random, Selector, Unscored, parse_selector


class SelectedTable:
    """One table of one step on its way through the selectors."""

    def __init__(
        self,
        select: Sequence[str] = ("top", "bottom", "random"),
        *,
        seed: int = 0,
        keep_all: bool = False,
        num_traces: int = 0,
    ) -> None:
        parsed = [parse_selector(text, seed) for text in select]
        if not any(reason == "unscored" for reason, _ in parsed):
            parsed.append(("unscored", Unscored(UNSCORED_SHOWN)))
        self._selectors: list[tuple[str, Selector]] = parsed
        self._traces = Random(num_traces, seed)
        self._all: list[Entry] | None = [] if keep_all else None
        self.num_rows = 0
        """Rows offered, on all ranks merged so far."""
        self.num_without_score = 0
        """Rows with neither a score nor a reward."""

    def extend(self, rows: list[Row]) -> None:
        """Offers rows to every selector."""
        for row in rows:
            entry = Entry(plain_row(row))
            self.num_rows += 1
            self.num_without_score += entry.score is MISSING
            for _, selector in self._selectors:
                selector.add(entry)
            self._traces.add(entry)
            if self._all is not None:
                self._all.append(entry)

    def merge(self, other: "SelectedTable") -> None:
        """Takes in another rank's table of the same configuration."""
        for (_, ours), (_, theirs) in zip(self._selectors, other._selectors, strict=True):
            for entry in theirs.candidates():
                ours.add(entry)
        for entry in other._traces.candidates():
            self._traces.add(entry)
        if self._all is not None and other._all is not None:
            self._all.extend(other._all)
        self.num_rows += other.num_rows
        self.num_without_score += other.num_without_score

    def rows(self) -> list[Row]:
        """The selected rows, highest score first and those without one last, each once, with `select_reason`."""
        return self._selected().rows()

    def kept_rows(self) -> list[Row]:
        """With keep_all every row offered, each once, `select_reason` "" where no selector took it; else `rows()`."""
        found = self._selected()
        for entry in self._all or ():
            found.add(entry, None)
        return found.rows()

    def traces(self) -> list[Row]:
        """Rows to be shown as conversations: the selected ones first, then a seeded sample, `num_traces` in all."""
        found = self._selected()
        rows = found.rows()
        for entry in self._traces.entries():
            found.add(entry, "trace")
        rows += [row for row in found.rows() if row["select_reason"] == "trace"]
        return rows[: max(0, self._traces.k)]

    def _selected(self) -> "_Distinct":
        found = _Distinct()
        for reason, selector in self._selectors:
            for entry in selector.entries():
                found.add(entry, reason)
        return found


class _Distinct:
    """Entries without repetition, with the reasons that each was given."""

    def __init__(self) -> None:
        self._found: dict[Place, list[tuple[Entry, list[str]]]] = {}

    def add(self, entry: Entry, reason: str | None) -> None:
        """Adds the entry once; None gives no further reason."""
        twins = self._found.setdefault(entry.place, [])
        for known, reasons in twins:
            if known == entry:
                break
        else:
            reasons = []
            twins.append((entry, reasons))
        if reason is not None and reason not in reasons:
            reasons.append(reason)

    def rows(self) -> list[Row]:
        """In the order of SelectedTable.rows."""
        pairs = [pair for twins in self._found.values() for pair in twins]
        pairs.sort(
            key=lambda pair: (
                -pair[0].score if pair[0].scored else math.inf,
                not pair[0].scored,
                pair[0].place,
                pair[0],
            )
        )
        return [_with_reason(entry.row, ", ".join(reasons)) for entry, reasons in pairs]


def _with_reason(row: Row, reason: str) -> Row:
    row = {**row, "select_reason": reason}
    return {column: row[column] for column in (*(c for c in EPISODE_COLUMNS if c in row), *row)}
