"""Threads that run user code (tools and environments), which may block, fail or never return."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple


class CallResult(NamedTuple):
    """The value a call returned, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


def result_of(call: Callable[[], Any]) -> CallResult:
    """Runs the call. SystemExit is caught too, because a thread would swallow it silently."""
    try:
        return CallResult(value=call())
    except BaseException as error:
        return CallResult(error=error)


def call_side_by_side(
    seconds: float, calls: Sequence[Callable[[], Any]], most: int
) -> list[CallResult]:
    """Runs the calls at the same time, up to `most` of them, and returns their results in order.

    A call that has not returned after `seconds`, counted from the beginning of all, has a TimeoutError. Its thread cannot
    be stopped. It is a daemon thread, so it does not delay the end of the run.
    """
    waiting, returned = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, CallResult]]()
    begun: set[int] = set()
    ends_at = time.monotonic() + seconds

    def work() -> None:
        """Makes waiting calls until none is left or the time is over."""
        while time.monotonic() < ends_at:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            begun.add(place)
            returned.put((place, result_of(calls[place])))

    for place in range(len(calls)):
        waiting.put(place)
    for _ in calls[:most]:
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, CallResult] = {}
    while len(results) < len(calls):
        try:
            place, result = returned.get(
                timeout=min(max(ends_at - time.monotonic(), 0), threading.TIMEOUT_MAX)
            )
        except queue.Empty:
            break
        results[place] = result
    late = CallResult(error=TimeoutError(f"took longer than {seconds:g} s"))
    unbegun = f"not begun within {seconds:g} s, the time of all calls of one message"
    missed = CallResult(error=TimeoutError(unbegun))
    return [
        results.get(place) or (late if place in begun else missed) for place in range(len(calls))
    ]


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that all coroutines of environments, tools and agents share."""
    global _loop
    with _loop_lock:  # the first calls may come from several threads at once
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(_loop,), daemon=True).start()
        return _loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop forever. A task that raises SystemExit or KeyboardInterrupt has it as its error; it does not end the loop of all."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def resolve(value: Any, seconds: float | None = None) -> Any:
    """Returns the value; an awaitable is awaited first. After `seconds` it is cancelled and TimeoutError is raised.

    All coroutines share one event loop in its own thread, so they can share an open client. A coroutine that blocks the
    loop delays all others.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_awaited(value), event_loop())
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            raise
        raise TimeoutError(f"took longer than {seconds:g} s") from None


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


class Worker:
    """A thread that runs calls one after another and passes each result to the call's own `report`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], Any], Callable[[CallResult], None]] | None
        ]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any], report: Callable[[CallResult], None]) -> None:
        self._calls.put((function, report))

    def close(self) -> None:
        """Ends the thread after the queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, report = call
            report(result_of(function))
