"""What happens in a run, told to whoever listens: numbers, phases with their seconds, lines for people.

The core calls these functions and knows no listener. `train.py` adds them: the metrics, the terminal, the rank's status file.
Without listeners numbers are dropped and phases are silent; `progress` prints in any case.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Literal

Kind = Literal["phase", "heartbeat", "timed"]


class Listener:
    """Hears what happens on this rank. A subclass overrides what it needs; nothing in it may raise."""

    def record(self, key: str, value: Any, reduction: str, weight: float) -> None:
        """A number, or rows of a table: see `record_metric`."""

    def moved(self, where: str) -> None:
        """The rank entered or left a context. Example: "step 3: grade"."""

    def during(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Held open as long as the context `name` is."""
        return nullcontext()

    def output_of(self, whose: str) -> AbstractContextManager[None]:
        """Held open while other people's code runs and may print."""
        return nullcontext()


_listeners: list[Listener] = []
running: list[str] = []
"""The names of the open contexts, outermost first."""


def listen(listener: Listener) -> Callable[[], None]:
    """Tell `listener` what happens from now on; returns a function that ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def progress(message: str) -> None:
    """Print one line, from global rank 0 alone (by torchrun's RANK). Never raises."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):  # a full disk, a pipe nobody reads, a closed or an ASCII stream
            print(message, flush=True)


def record_metric(key: str, value: Any, reduction: str = "mean", weight: float = 1.0) -> None:
    """Record a value under `key` for this step's flush; on any rank, in any thread. Never communicates or raises.

    Args:
        key: such as "reward/mean".
        value: a number or a 0-d tensor; for "distribution" also a list or a 1-D tensor of numbers; for "table" a dict or a
            list of dicts, each one row.
        reduction: how values of the key are merged over calls and ranks, a value of `observability.Reduce`; one key has one.
        weight: of a mean or a standard deviation: how many units (tokens, sequences) the value stands for.

    A value that is the same on every rank is recorded by every rank with "last". Of a distribution or a table each rank
    records its own share.
    """
    for listener in _listeners:
        listener.record(key, value, reduction, weight)


def record_metrics(metrics: Mapping[str, Any]) -> None:
    """Record each `types.Metric` under its key."""
    for key, metric in metrics.items():
        record_metric(key, metric.value, metric.reduction, metric.weight)


def timed(name: str) -> AbstractContextManager[None]:
    """Record the seconds spent inside as `time/{name}`: summed over the step's calls on a rank, of the slowest rank."""
    return _inside("timed", name)


def phase(name: str) -> AbstractContextManager[None]:
    """A long part of the start: the terminal shows its begin, its end with its seconds, and that it still runs."""
    return _inside("phase", name)


def heartbeat(name: str) -> AbstractContextManager[None]:
    """A part that is usually short: the terminal shows it only when it takes long, with the `timed` part it is in."""
    return _inside("heartbeat", name)


@contextmanager
def output_of(whose: str) -> Iterator[None]:
    """Inside, other people's code may print; listeners bound it. Example: output_of("reward functions")"""
    with ExitStack() as open_contexts:
        for listener in _listeners:
            open_contexts.enter_context(listener.output_of(whose))
        yield


@contextmanager
def _inside(kind: Kind, name: str) -> Iterator[None]:
    running.append(name)
    _moved()
    try:
        with ExitStack() as open_contexts:
            for listener in _listeners:
                open_contexts.enter_context(listener.during(kind, name))
            yield
    finally:
        running.pop()
        _moved()


def _moved() -> None:
    where = ": ".join(dict.fromkeys([*running[:1], *running[-1:]])) or "between steps"
    for listener in _listeners:
        listener.moved(where)
