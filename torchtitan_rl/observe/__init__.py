"""Metrics, sample tables and traces. Nothing in this package can change training. See docs/observability.md."""

from importlib import import_module
from typing import Any

PLACES = {
    "phase": "events",
    "progress": "events",
    "record_metric": "events",
    "timed": "events",
    "Recorder": "observe.recorder",
    "Reduce": "observe.reduce",
    "episode_rows": "observe.sample_rows",
    "read_rows": "observe.store",
}
"""Module of each name that this package offers. It is imported when the name is asked for: the report needs none of them."""

__all__ = [*PLACES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no {name}")
    return getattr(import_module(f"torchtitan_rl.{PLACES[name]}"), name)
