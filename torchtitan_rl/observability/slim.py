"""Leaves out the series that tell nothing: those that never change, and those equal to another."""

from collections import deque

WINDOW = 10
"""Steps that a series must stay constant, or equal to another, before it is left out."""


class Slim:
    """Drops constant and duplicate series; one that changes comes back at that step."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def __call__(self, values: dict[str, float]) -> dict[str, float]:
        """The values of the series worth showing this step. Of equal series the first by name stays."""
        for key, value in values.items():
            self._recent.setdefault(key, deque(maxlen=WINDOW)).append(value)
        kept: dict[str, float] = {}
        seen: set[tuple[float, ...]] = set()
        for key in sorted(values):
            recent = tuple(self._recent[key])
            if len(recent) == WINDOW and (len(set(recent)) == 1 or recent in seen):
                continue
            seen.add(recent)
            kept[key] = values[key]
        return {key: value for key, value in values.items() if key in kept}
