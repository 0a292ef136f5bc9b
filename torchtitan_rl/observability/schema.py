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
        for column, cell in (pair for row in rows for pair in row.items()):
            kind = kind_of(cell)
            if column not in kinds and not is_new:
                told = f"has a new column {column!r} from step {step} on; earlier rows have none there"
                self._warn(f"{table} {column}", f"table {table!r} {told}")
            known = kinds.setdefault(column, kind)
            if known is None:
                kinds[column] = kind
            elif kind not in (None, known) and known != "mixed":
                told = f"column {column!r} held {known}, and {kind} from step {step} on: now text"
                self._warn(f"{table} {column} mixed", f"table {table!r}: {told}")
                kinds[column] = "mixed"
        mixed = {column for column, kind in kinds.items() if kind == "mixed"}
        if not mixed:
            return rows
        return [{c: str(cell) if c in mixed and cell is not None else cell for c, cell in row.items()} for row in rows]
