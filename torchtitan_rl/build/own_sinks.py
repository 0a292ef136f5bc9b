"""Loads the sinks that `metrics.sinks` names by their place: path/to/file.py:Class or package.module:Class."""

from collections.abc import Sequence
from typing import get_args

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import load_class
from torchtitan_rl.observe.sinks import SINKS, Sink, name_and_mode
from torchtitan_rl.observe.sinks.base import Mode


def load_own_sinks(sinks: Sequence[str]) -> dict[str, type[Sink]]:
    """Returns the classes by their place. Raises UserError, naming `metrics.sinks`, for a place without a sink."""
    found: dict[str, type[Sink]] = {}
    for text in sinks:
        place, _ = name_and_mode(text)
        if place in SINKS or ":" not in place:
            continue
        modes = f"a mode after the class that is one of {get_args(Mode)}"
        expect(
            ":" not in place.rpartition(":")[0],
            "metrics.sinks",
            text,
            modes,
            "Leave it out for global_reduce.",
        )
        found[place] = load_class(place, "metrics.sinks", Sink)
    return found
