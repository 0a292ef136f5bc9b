"""Threads that run user code (tools and environments), which may block, fail or never return."""

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
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


def call_with_timeout(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what `function` returns, or raises what it raises. Raises TimeoutError after `seconds`.

    The thread of a call that timed out cannot be stopped. It is a daemon thread, so it does not delay the end of the
    run.
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
    """Returns the value; an awaitable is awaited first. After `seconds` it is cancelled and TimeoutError is raised.

    All coroutines share one event loop in its own thread, so they can share an open client. A coroutine that blocks the
    loop delays all others.
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
    """A thread that runs calls one after another and passes each result to `report`."""

    def __init__(self, report: Callable[[CallResult], None]) -> None:
        self._report = report
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any]) -> None:
        """Queues the call."""
        self._calls.put(function)

    def close(self) -> None:
        """Ends the thread after the queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._report(result_of(call))
