"""Leaves uninformative series out of the charts: constant ones, and ones equal to another series."""

import fnmatch
from array import array
from collections.abc import Sequence
from typing import Any

SHORT = 10
"""At the end of a run, every series with fewer points is charted."""

Points = dict[int, dict[str, float]]
"""Values to chart, by step and name."""


class Slim:
    """Decides which series are charted. A series is charted with all its points or not at all, so that no line is false.

    It is charted from the step on in which it has had two values and differs from every other series; its points up to there
    are drawn then. A series that matches `always` is charted from the start. What is charted once stays charted.
    """

    def __init__(self, always: Sequence[str] = ()) -> None:
        self._always = tuple(always)
        self.charted: set[str] = set()
        self._held: dict[str, tuple[array[int], array[float]]] = {}
        """The steps and values of each series that is not charted."""
        self._first: dict[str, float] = {}
        """The first value of each series that is not charted."""
        self._moved: set[str] = set()
        """Names of series with two different values."""
        self._prints: dict[str, int] = {}
        """A hash of each series' points. Equal series have equal hashes."""

    def __call__(self, step: int, values: dict[str, float]) -> Points:
        """Returns the points to draw after `step`: those of this step, and earlier ones of newly charted series.

        Of equal series, the one that matches `always`, or else the first by name, is charted.
        """
        points: Points = {step: {}}
        for key, value in values.items():
            self._prints[key] = hash((self._prints.get(key, 0), step, value))
            if key not in self.charted:
                self._hold(key, step, value)
        seen = {self._prints.get(key) for key in self.charted}
        for key in sorted(values):
            if key in self.charted:
                points[step][key] = values[key]
            elif self._protected(key) or (key in self._moved and self._prints[key] not in seen):
                self._chart(key, points)
                seen.add(self._prints[key])
        return points

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to chart the same series at the same steps, as JSON values."""
        moved = sorted(self._moved - self.charted)
        return {"charted": sorted(self.charted), "moved": moved, "first": self._first, "prints": self._prints}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Points before the resume are not drawn again."""
        self.charted.update(state.get("charted", ()))
        self._moved.update(state.get("moved", ()))
        self._first.update(state.get("first", {}))
        self._prints.update(state.get("prints", {}))

    def rest(self) -> Points:
        """Returns the points of the series that have been too short to be judged, at the end of a run."""
        points: Points = {}
        for key in [key for key, (steps, _) in self._held.items() if len(steps) < SHORT]:
            self._chart(key, points)
        return points

    def _hold(self, key: str, step: int, value: float) -> None:
        steps, held = self._held.setdefault(key, (array("q"), array("d")))
        steps.append(step)
        held.append(value)
        if value != self._first.setdefault(key, value):
            self._moved.add(key)

    def _chart(self, key: str, points: Points) -> None:
        self.charted.add(key)
        self._first.pop(key, None)
        for step, value in zip(*self._held.pop(key), strict=True):
            points.setdefault(step, {})[key] = value

    def _protected(self, key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self._always)
