"""Events of a run for its listeners: metrics, timed phases and progress lines.

The core calls these functions. `command/train.py` adds the listeners: the metrics, the terminal and the watchdog. Without
listeners metrics are dropped and phases are silent; `progress` always prints.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

WATCH_VARIABLE = "TORCHTITAN_RL_WATCH"
"""The environment variable that names the folder of this node's ranks, if a launcher watches: statuses, and what agents and
environments write. The launcher removes it."""
T = TypeVar("T")
Kind = Literal["phase", "heartbeat", "timed", "waiting"]


class Listener:
    """Receives the events of this rank. A subclass overrides the methods it needs; none may raise."""

    def record(self, key: str, value: Any, reduction: str, weight: float) -> None:
        """Called with a number or the rows of a table: see `record_metric`."""

    def moved(self, where: str) -> None:
        """Called when the rank enters or leaves a context. Example: "step 3: grade"."""

    def advanced(self) -> None:
        """Called when work within a context has advanced: the engine decoded a token, or a micro-batch is done."""

    def during(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """A context that is open for as long as the context `name`."""
        return nullcontext()


_listeners: list[Listener] = []
_only_of_process: list[Listener] = []
_only_of_task: ContextVar[Listener | None] = ContextVar("only_of_task", default=None)
running: list[str] = []
"""The names of the open contexts, outermost first."""
began: list[float] = []
"""When each of them began, by `time.perf_counter`."""
counts: list[str] = []
"""How far the open loops of `counted` are, innermost last. Example: "37 of 256"."""
PHASE = "torchtitan_rl_phase"
"""The attribute of an error with the contexts in which it was raised."""


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener; returns a function that removes it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


@contextmanager
def recorded_by(only: Listener, *, in_task: bool = False) -> Iterator[None]:
    """Send what is recorded inside to `only`, from every thread of the process or, with `in_task`, of this asyncio task.

    A reward function's values travel so with its scores, whichever process calls it.
    """
    if in_task:
        before = _only_of_task.set(only)
    else:
        _only_of_process.append(only)
    try:
        yield
    finally:
        if in_task:
            _only_of_task.reset(before)
        else:
            _only_of_process.remove(only)


def progress(message: str) -> None:
    """Print one line on global rank 0 (torchrun's RANK). Never raises."""
    if os.environ.get("RANK", "0") == "0":
        # A full disk, a closed stream, a print in a print.
        with suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


def record_metric(key: str, value: Any, reduction: str = "mean", weight: float = 1.0) -> None:
    """Record a value for this step's flush. Works on any rank in any thread, never communicates, never raises.

    Args:
        key: such as "reward/mean".
        value: a number or a 0-d tensor; for "distribution" also a list or a 1-D tensor of numbers; for "table" a dict
            or a list of dicts, each of them one row.
        reduction: the merge over calls and ranks, a value of `observe.reduce.Reduce`; always the same for one key.
        weight: for a mean or a standard deviation, the number of units (tokens, sequences) that the value stands for.

    Every rank records a value that is equal on all ranks, with "last". Each rank records its own share of a
    distribution or a table.
    """
    of_task = _only_of_task.get()
    for listener in [of_task] if of_task else _only_of_process or _listeners:
        listener.record(key, value, reduction, weight)


def record_metrics(metrics: Mapping[str, Any]) -> None:
    """Record each `types.Metric` under its key."""
    for key, metric in metrics.items():
        record_metric(key, metric.value, metric.reduction, metric.weight)


def advanced() -> None:
    """Report that the work of the open context goes on. Cheap enough for each decode step."""
    for listener in _listeners:
        listener.advanced()


def timed(name: str) -> AbstractContextManager[None]:
    """Record the seconds inside as `time/{name}`: the sum of a step's calls on the slowest rank."""
    return _inside("timed", name)


def waiting(name: str) -> AbstractContextManager[None]:
    """`timed`, where this rank waits for others that work on something else: it holds up none of them."""
    return _inside("waiting", name)


def phase(name: str) -> AbstractContextManager[None]:
    """A long phase of the start. The terminal shows its beginning, its progress, and its duration."""
    return _inside("phase", name)


def heartbeat(name: str) -> AbstractContextManager[None]:
    """A usually short phase. The terminal shows it, with the current `timed` part, only if it takes long."""
    return _inside("heartbeat", name)


def counted(items: Iterable[T], total: int) -> Iterator[T]:
    """Yields the items, and keeps how many of `total` there were in `counts` for the heartbeat."""
    counts.append(f"0 of {total}")
    try:
        for number, item in enumerate(items, start=1):
            counts[-1] = f"{number} of {total}"
            yield item
    finally:
        counts.pop()


@contextmanager
def _inside(kind: Kind, name: str) -> Iterator[None]:
    running.append(name)
    began.append(time.perf_counter())
    _moved()
    try:
        with ExitStack() as open_contexts:
            for listener in _listeners:
                open_contexts.enter_context(listener.during(kind, name))
            yield
    except BaseException as error:
        error.__dict__.setdefault(PHASE, _where())
        raise
    finally:
        running.pop()
        began.pop()
        _moved()


def _where() -> str:
    """The outermost and the innermost open context. Example: "step 3: grade"."""
    return ": ".join(dict.fromkeys([running[0], running[-1]])) if running else "between steps"


def _moved() -> None:
    for listener in _listeners:
        listener.moved(_where())
