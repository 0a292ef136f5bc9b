"""What a person at the terminal sees of the phases that are not steps, and the seconds that phases take."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan_rl.observability.collector import active

HEARTBEAT_SECONDS = 8.0
"""No phase is silent for longer than 10 s."""


def progress(message: str) -> None:
    """Prints one line, from global rank 0 alone (by torchrun's RANK)."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stdout, flush=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says that `name` began, every 8 s that it still runs, and how many seconds it took or when it failed.

    Example: `with phase("start vLLM engine"):` prints "start vLLM engine ..." and then "start vLLM engine: 6.2 s".
    """
    started = time.perf_counter()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            progress(f"{name} ... {time.perf_counter() - started:.0f} s")

    progress(f"{name} ...")
    threading.Thread(target=beat, name=f"heartbeat of {name}", daemon=True).start()
    outcome = "failed after"
    try:
        yield
        outcome = ""
    finally:
        done.set()
        progress(f"{name}: {outcome}{' ' if outcome else ''}{time.perf_counter() - started:.1f} s")


@dataclass
class Stopwatch:
    """What `timed` yields; `seconds` is set when the context ends."""

    seconds: float = 0.0


@contextmanager
def timed(name: str) -> Iterator[Stopwatch]:
    """Records the seconds spent inside as `time/{name}`: summed over the step's calls on a rank, of the slowest rank.

    Example: `with timed("generate"):` records time/generate.
    """
    started = time.perf_counter()
    watch = Stopwatch()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - started
        collector = active()
        if collector is not None:
            collector.add_seconds(name, watch.seconds)
