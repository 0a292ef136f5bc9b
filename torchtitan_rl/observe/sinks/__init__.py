"""Sinks: the outputs that steps are written to. A new sink is one class in its own file; here the built-in ones have names."""

import difflib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import get_args

from torchtitan_rl.errors import expect
from torchtitan_rl.observe.sinks.base import Mode, Sink, SinkContext, StepRecord
from torchtitan_rl.text import with_spaces

SINKS = {
    "console": f"{__name__}.console:ConsoleSink",
    "jsonl": f"{__name__}.files:JsonlSink",
    "local": f"{__name__}.files:LocalSink",
    "tensorboard": f"{__name__}.tensorboard:TensorboardSink",
    "trackio": f"{__name__}.trackio:TrackioSink",
    "wandb": f"{__name__}.wandb:WandbSink",
}
"""Module and class of each sink, imported only when the sink is used."""


def name_and_mode(text: str) -> tuple[str, str]:
    """Splits an entry of `metrics.sinks`.

    Examples: "jsonl" -> ("jsonl", "global_reduce"), "my_sink.py:Csv:per_rank_reduce" -> ("my_sink.py:Csv", "per_rank_reduce")
    """
    name, _, mode = text.rpartition(":")
    if mode in get_args(Mode) or name in SINKS:
        return name, mode
    return text, "global_reduce"


def chosen_sinks(
    names: Sequence[str], own: Mapping[str, type[Sink]] | None = None
) -> dict[str, tuple[type[Sink], Mode]]:
    """The classes and modes for the names in a config, such as ["console", "jsonl:per_rank_reduce"].

    Args:
        own: the user's sinks by their place, as in `names`.

    Raises: UserError for an unknown sink, a mode it does not support, or a library that is not installed.
    """
    chosen: dict[str, tuple[type[Sink], Mode]] = {}
    for text in names:
        name, mode = name_and_mode(text)
        near = difflib.get_close_matches(name, SINKS, 1)
        hint = f"Did you mean {near[0]!r}?" if near else "See docs/observability.md."
        hint = f"Put spaces between them: {with_spaces(text)}" if "," in text else hint
        known = {**SINKS, **(own or {})}
        expect(
            name in known,
            "metrics.sinks",
            text,
            f"one of {', '.join(SINKS)}, or path/to/file.py:Class",
            hint,
        )
        expect(
            name not in chosen, "metrics.sinks", text, "each sink once", "A sink runs in one mode."
        )
        sink = known[name]
        if isinstance(sink, str):
            module, _, class_name = sink.partition(":")
            sink = getattr(importlib.import_module(module), class_name)
        modes = f"a mode of {name}: {', '.join(sink.modes)}"
        expect(
            mode in sink.modes, "metrics.sinks", text, modes, "Without a mode it is global_reduce."
        )
        there = sink.requires is None or importlib.util.find_spec(sink.requires) is not None
        install = f"Install it with: pip install {sink.requires}"
        expect(there, "metrics.sinks", text, f"the library {sink.requires}", install)
        chosen[name] = (sink, mode)
    return chosen
