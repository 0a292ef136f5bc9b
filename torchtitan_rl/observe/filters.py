"""Filters: the series and tables that each sink gets, from the entries of `metrics.filters`."""

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import replace

from torchtitan_rl.errors import expect
from torchtitan_rl.observe.sinks import StepRecord


class Filter:
    """The patterns of one sink. The last one that matches a key decides.

    Example: ["!*/p*", "reward/*:10"] takes all but the quantiles at each step, and reward/... every 10 steps.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._takes_others = patterns[0].startswith("!")
        self._rules: list[tuple[str, int]] = []  # pattern, steps between two values; 0: never
        for pattern in patterns:
            start, _, every = pattern.rpartition(":")
            rule = (start, int(every)) if start and every.isdigit() else (pattern, 1)
            self._rules.append((pattern[1:], 0) if pattern.startswith("!") else rule)

    def takes(self, key: str, step: int) -> bool:
        every = int(self._takes_others)
        for pattern, steps in self._rules:
            if fnmatch.fnmatchcase(key, pattern):
                every = steps
        return every > 0 and step % every == 0

    def part(self, record: StepRecord) -> StepRecord:
        parts = {}
        for name in ("values", "stored", "distributions"):
            items = getattr(record, name).items()
            parts[name] = {key: value for key, value in items if self.takes(key, record.step)}
        return replace(record, **parts)


def sink_filters(entries: Sequence[str], sinks: Collection[str]) -> dict[str, Filter]:
    """The filter of each sink. Raises UserError for an entry without patterns or of an unknown sink."""
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        sink, _, text = entry.rpartition("=")
        expected = f"sink=pattern,pattern, once for a sink of this run: {', '.join(sinks)}"
        remedy = "Example: wandb=!*/samples,!*/p05"
        holds = sink in sinks and sink not in patterns and all(text.split(","))
        expect(holds, "metrics.filters", entry, expected, remedy)
        patterns[sink] = text.split(",")
    return {sink: Filter(patterns.get(sink, ["*"])) for sink in sinks}
