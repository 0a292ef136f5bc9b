"""Sinks: the outputs that steps are written to. A new sink is one class in its own file; here the built-in ones have names."""

import importlib.util
from collections.abc import Sequence

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.references import load_class
from torchtitan_rl.observe.sinks.base import Sink, SinkContext, StepRecord

SINKS = {
    "console": f"{__name__}.console:ConsoleSink",
    "jsonl": f"{__name__}.files:JsonlSink",
    "local": f"{__name__}.files:LocalSink",
    "tensorboard": f"{__name__}.tensorboard:TensorboardSink",
    "trackio": f"{__name__}.trackio:TrackioSink",
    "wandb": f"{__name__}.wandb:WandbSink",
}
"""Module and class of each sink, imported only when the sink is used."""


def chosen_sinks(names: Sequence[str]) -> dict[str, type[Sink]]:
    """The classes of the sinks in a config, such as ["console", "my_sink.py:Csv"], and of "local", by their names.

    Raises: UserError for an unknown sink, one that is named twice, or a library that is not installed.
    """
    chosen: dict[str, type[Sink]] = {}
    for name in names:
        expect(name not in chosen, "metrics.sinks", name, "each sink once", "Name it once.")
        chosen[name] = _sink_class(name)
    return {**chosen, "local": _sink_class("local")}


def _sink_class(name: str) -> type[Sink]:
    forms = f"one of {', '.join(SINKS)}, or path/to/file.py:Class"
    is_known = name in SINKS or ":" in name
    expect(is_known, "metrics.sinks", name, forms, "See docs/observability.md.")
    sink = load_class(SINKS.get(name, name), "metrics.sinks", Sink)
    installed = sink.requires is None or importlib.util.find_spec(sink.requires) is not None
    install = f"Install it with: pip install {sink.requires}"
    expect(installed, "metrics.sinks", name, f"the library {sink.requires}", install)
    return sink
