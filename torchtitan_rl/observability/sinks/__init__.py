"""Where steps are written to. A new sink is one class in a file of its own and one line here."""

import difflib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import get_args

from torchtitan_rl.observability.sinks.base import Mode, Sink, SinkContext, StepRecord

SINKS = {
    "console": f"{__name__}.console:ConsoleSink",
    "jsonl": f"{__name__}.jsonl:JsonlSink",
    "local": f"{__name__}.local:LocalSink",
    "tensorboard": f"{__name__}.tensorboard:TensorboardSink",
    "trackio": f"{__name__}.trackio:TrackioSink",
    "wandb": f"{__name__}.wandb:WandbSink",
}
"""Module and class of each, imported only when the sink is used."""

__all__ = ["SINKS", "Mode", "Sink", "SinkContext", "StepRecord", "chosen_sinks"]


def chosen_sinks(names: Sequence[str]) -> dict[str, tuple[type[Sink], Mode]]:
    """The classes and modes that a config's list asks for, such as ["console", "jsonl:per_rank_reduce"].

    Raises: ValueError for an unknown sink, an unknown mode or one that the sink cannot run in; ImportError, with the
    install command, for a sink whose library is missing.
    """
    chosen: dict[str, tuple[type[Sink], Mode]] = {}
    for text in names:
        name, _, mode = text.partition(":")
        mode = mode or "global_reduce"
        if name not in SINKS:
            near = difflib.get_close_matches(name, SINKS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"recorder.sinks: unknown sink {name!r}; known: {', '.join(SINKS)}.{hint}")
        if name in chosen:
            raise ValueError(f"recorder.sinks: {name!r} is named twice; a sink runs in one mode")
        module, _, class_name = SINKS[name].partition(":")
        sink = getattr(importlib.import_module(module), class_name)
        if mode not in sink.modes:
            known = "a mode of another sink" if mode in get_args(Mode) else "no mode"
            raise ValueError(f"recorder.sinks: {text!r}: {mode!r} is {known}; {name} has {', '.join(sink.modes)}")
        if sink.requires and importlib.util.find_spec(sink.requires) is None:
            raise ImportError(
                f"recorder.sinks: {name!r} needs the library {sink.requires}, which is not installed. "
                f"Install it with: pip install {sink.requires}"
            )
        chosen[name] = (sink, mode)
    return chosen
