"""The columns of each table over a whole run: new ones are announced, and a column of several types becomes text."""

from collections.abc import Callable

from torchtitan_rl.observability.rows import Row


def kind_of(cell: object) -> str | None:
    """What a cell is for the purposes of a column: "truth", "number", "text", "nested", or None for no value."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "truth"
    if isinstance(cell, (int, float)):
        return "number"
    return "text" if isinstance(cell, str) else "nested"


class Schema:
    """Remembers the columns and kinds of every table; `warn(topic, message)` hears of changes once each."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._kinds: dict[str, dict[str, str | None]] = {}

    def fit(self, table: str, rows: list[Row], step: int) -> list[Row]:
        """The rows with every cell of a column of several kinds as text, from the step on where the second appears."""
        is_new = table not in self._kinds
        kinds = self._kinds.setdefault(table, {})
        for row in rows:
            for column, cell in row.items():
                self._note(table, kinds, column, kind_of(cell), step, announce=not is_new)
        mixed = {column for column, kind in kinds.items() if kind == "mixed"}
        if not mixed:
            return rows
        return [{c: str(cell) if c in mixed and cell is not None else cell for c, cell in row.items()} for row in rows]

    def _note(
        self, table: str, kinds: dict[str, str | None], column: str, kind: str | None, step: int, *, announce: bool
    ) -> None:
        if column not in kinds:
            if announce:
                self._warn(
                    f"{table} {column}",
                    f"table {table!r} has a new column {column!r} from step {step} on; earlier rows have none there",
                )
            kinds[column] = kind
        elif kinds[column] is None:
            kinds[column] = kind
        elif kind is not None and kinds[column] not in (kind, "mixed"):
            self._warn(
                f"{table} {column} mixed",
                f"table {table!r}: column {column!r} held {kinds[column]}, and {kind} from step {step} on: now text",
            )
            kinds[column] = "mixed"
