"""Calls of other people's code that may wait, fail or never come back, off the thread that drives the engine."""

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class CallResult(NamedTuple):
    """What came of a call."""

    value: Any = None
    error: BaseException | None = None


def result_of(call: Callable[[], Any]) -> CallResult:
    """What the call returned or raised; an exit too, which in a thread would be lost."""
    try:
        return CallResult(value=call())
    except BaseException as error:
        return CallResult(error=error)


def call_with_timeout(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns or raises. Raises TimeoutError after `seconds`; the call then goes on unheard in its thread.

    A thread that never comes back cannot be ended; as a daemon it does not hold up the end of the run.
    """
    results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
    call = functools.partial(function, *args, **kwargs)
    threading.Thread(target=lambda: results.put(result_of(call)), daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    if error is not None:
        raise error
    return value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def resolve(value: Any, seconds: float | None = None) -> Any:
    """The value, or what it gives when awaited. Raises TimeoutError, and cancels it, after `seconds`.

    All coroutines run on one event loop in a thread of its own, so that a client which one of them opened serves the others;
    one that blocks the loop holds the others up.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_awaited(value), _event_loop())
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            raise
        raise TimeoutError(f"took longer than {seconds:g} s") from None


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


class Worker:
    """A thread that makes calls one after the other and hands each result to `report`."""

    def __init__(self, report: Callable[[CallResult], None]) -> None:
        self._report = report
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any]) -> None:
        """Make this call when those before are done."""
        self._calls.put(function)

    def close(self) -> None:
        """End the thread after the calls it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._report(result_of(call))
