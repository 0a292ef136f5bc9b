"""Removes uninformative series from charts: constant ones, and ones equal to another series."""

import fnmatch
from collections import deque
from collections.abc import Sequence

WINDOW = 10
"""Steps for which a series must be constant, or equal to another, before it is removed."""


class Slim:
    """Removes constant and duplicate series, except those matching `always`. A series returns as soon as it changes."""

    def __init__(self, always: Sequence[str] = ()) -> None:
        self._always = tuple(always)
        self._recent: dict[str, deque[float]] = {}
        self._protected: dict[str, bool] = {}

    def __call__(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the values to chart in this step. Of equal series, the first by name is kept."""
        for key, value in values.items():
            if key not in self._recent:
                self._recent[key] = deque(maxlen=WINDOW)
                self._protected[key] = any(fnmatch.fnmatchcase(key, pattern) for pattern in self._always)
            self._recent[key].append(value)
        kept: set[str] = set()
        seen: set[tuple[float, ...]] = set()
        for key in sorted(values, key=lambda key: (not self._protected[key], key)):
            recent = tuple(self._recent[key])
            tells_nothing = len(recent) == WINDOW and (len(set(recent)) == 1 or recent in seen)
            if self._protected[key] or not tells_nothing:
                seen.add(recent)
                kept.add(key)
        return {key: value for key, value in values.items() if key in kept}
