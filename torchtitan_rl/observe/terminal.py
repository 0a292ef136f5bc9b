"""Prints the start and end of phases, and heartbeats of long ones, to the terminal."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torchtitan_rl import events
from torchtitan_rl.events import Kind, Listener, progress

HEARTBEAT_SECONDS, LONGEST_SILENCE_SECONDS = 8.0, 120.0
"""Seconds until a running phase's first heartbeat, and the longest time between two heartbeats."""

PARTS = {
    "generate": "sampling",
    "generate/environments": "waiting for tools and environments",
    "grade": "computing rewards",
    "gather": "gathering all ranks' completions",
    "train": "training",
    "sync": "copying the weights to the engine",
    "checkpoint/save": "saving the checkpoint",
}
"""The words of heartbeats for parts of a step; others have their own name."""


class Terminal(Listener):
    """Prints phases and heartbeats."""

    def __init__(self, slowest: Callable[[], str] = str) -> None:
        """`slowest`: says which rank holds up the others, as "rank 1 in step 3: grade for 6 s"; "" if none."""
        self._slowest = slowest

    def during(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        return {"phase": _phase, "heartbeat": self._heartbeat}.get(kind, nullcontext)(name)

    def _heartbeat(self, name: str) -> AbstractContextManager[None]:
        """Example: "step 3: sampling, 12 of 128 completions ... 8 s (rank 1 in step 3: generate for 6 s; ...)". The seconds are the part's."""

        def describe(seconds: float) -> str:
            behind, parts = self._slowest(), []
            if len(events.running) > 1:
                part, seconds = events.running[-1], time.perf_counter() - events.began[-1]
                parts.append(PARTS.get(part.removeprefix("evaluation/"), part))
            # The main thread may end the loop now: a slice never raises.
            parts += [f"{count} completions" for count in events.counts[-1:]]
            return f"{name}: {', '.join(parts) or 'working'} ... {seconds:.0f} s{f' ({behind})' if behind else ''}"

        return _beating(describe)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Example: "start the vLLM engine ..." and then "start the vLLM engine: 6.2 s"."""
    started = time.perf_counter()
    progress(f"{name} ...")
    outcome = "failed after "
    try:
        with _beating(lambda seconds: f"{name} ... {seconds:.0f} s"):
            yield
        outcome = ""
    finally:
        progress(f"{name}: {outcome}{time.perf_counter() - started:.1f} s")


@contextmanager
def _beating(describe: Callable[[float], str]) -> Iterator[None]:
    """Prints `describe(seconds so far)` until the context ends: at 8, 16, 32, 64, 128 s, then every 120 s."""
    started = time.perf_counter()
    done = threading.Event()

    def beat() -> None:
        pause = HEARTBEAT_SECONDS
        while not done.wait(pause):
            so_far = time.perf_counter() - started
            progress(describe(so_far))
            pause = min(so_far, LONGEST_SILENCE_SECONDS)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        done.set()
