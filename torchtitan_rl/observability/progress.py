"""What a person at the terminal sees of the phases that are not steps, and the seconds that phases take."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torchtitan_rl.observability.collector import active

HEARTBEAT_SECONDS, LONGEST_SILENCE_SECONDS = 8.0, 120.0
"""When a phase first says that it goes on; each line then comes after as long again as it has taken so far, but at most the second."""

HEARTBEAT_THREAD = "heartbeat"
"""The name of the threads that say so."""


_running: list[str] = []
"""The names of the `phase`, `heartbeat` and `timed` contexts that are open, outermost first."""

_followers: list[Callable[[str], None]] = []
_slowest: list[Callable[[], str]] = []


def follow(entered: Callable[[str], None], slowest: Callable[[], str]) -> None:
    """From now on `entered` is called with every change of what runs, and `slowest` asked by heartbeats who is behind.

    Example of a call: entered("step 3: grade").
    """
    _followers.append(entered)
    _slowest.append(slowest)


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """`name` is what runs, until the context ends."""
    _running.append(name)
    _moved()
    try:
        yield
    finally:
        _running.pop()
        _moved()


def _moved() -> None:
    where = ": ".join(dict.fromkeys([*_running[:1], *_running[-1:]])) or "between steps"
    for entered in _followers:
        entered(where)


def progress(message: str) -> None:
    """Prints one line, from global rank 0 alone (by torchrun's RANK). Never raises."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):  # a full disk, a pipe nobody reads, a closed or an ASCII stream
            print(message, flush=True)


@contextmanager
def _beating(describe: Callable[[float], str]) -> Iterator[None]:
    """Prints `describe(seconds so far)` from a thread until the context ends: at 8, 16, 32, 64, 128 s, then every two minutes."""
    started = time.perf_counter()
    done = threading.Event()

    def beat() -> None:
        pause = HEARTBEAT_SECONDS
        while not done.wait(pause):
            so_far = time.perf_counter() - started
            progress(describe(so_far))
            pause = min(so_far, LONGEST_SILENCE_SECONDS)

    threading.Thread(target=beat, name=HEARTBEAT_THREAD, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says that `name` began, now and then that it still runs, and how many seconds it took or when it failed.

    Example: `with phase("start vLLM engine"):` prints "start vLLM engine ..." and then "start vLLM engine: 6.2 s".
    """
    started = time.perf_counter()
    progress(f"{name} ...")
    outcome = "failed after "
    try:
        with _inside(name), _beating(lambda seconds: f"{name} ... {seconds:.0f} s"):
            yield
        outcome = ""
    finally:
        progress(f"{name}: {outcome}{time.perf_counter() - started:.1f} s")


@contextmanager
def heartbeat(name: str) -> Iterator[None]:
    """Says after 8 s and then more seldom that `name` still runs, which `timed` part of it, and who is behind: nothing for what is quicker.

    Example: `with heartbeat("step 3"):` prints "step 3: generate ... 8 s" in a long step, or "step 3: gather ... 8 s (rank 1
    (node0) in step 3: grade for 6 s; rank 0 (node0) waits in step 3: gather)".
    """

    def describe(seconds: float) -> str:
        behind = next((text for slowest in _slowest if (text := slowest())), "")
        part = _running[-1] if len(_running) > 1 else "working"
        return f"{name}: {part} ... {seconds:.0f} s{f' ({behind})' if behind else ''}"

    with _inside(name), _beating(describe):
        yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Records the seconds spent inside as `time/{name}`: summed over the step's calls on a rank, of the slowest rank.

    Example: `with timed("generate"):` records time/generate.
    """
    started = time.perf_counter()
    try:
        with _inside(name):
            yield
    finally:
        if (collector := active()) is not None:
            collector.add_seconds(name, time.perf_counter() - started)


def elapsed(name: str) -> float:
    """This rank's seconds in `timed(name)` since the last flush; 0 with metrics off."""
    collector = active()
    return 0.0 if collector is None else collector.elapsed(name)
