"""Threads that run user code (tools and environments), which may block, fail or never return."""

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any


def call_side_by_side(
    seconds: float, calls: Sequence[Callable[[], Any]], most: int
) -> list[Any | BaseException]:
    """Runs the calls at the same time, up to `most` of them. Returns each one's value or exception, in order.

    A call that has not returned after `seconds`, counted from the beginning of all, has a TimeoutError. Its thread cannot
    be stopped. It is a daemon thread, so it does not delay the end of the run.
    """
    worker = Worker(min(most, len(calls)))
    futures = [worker.call(call) for call in calls]
    worker.close()
    wait(futures, min(seconds, threading.TIMEOUT_MAX))
    unbegun = f"not begun within {seconds:g} s, the time of all calls of one message"
    results: list[Any | BaseException] = []
    for future in futures:
        if future.cancel():
            results.append(TimeoutError(unbegun))
        elif not future.done():
            results.append(TimeoutError(f"took longer than {seconds:g} s"))
        else:
            error = future.exception()
            results.append(future.result() if error is None else error)
    return results


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    """Runs the call, unless its future is cancelled. The watchdog knows such a thread by this function.

    SystemExit is caught too: a thread would swallow it silently.
    """
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that all coroutines of environments, tools and agents share."""
    global _loop
    with _loop_lock:  # the first calls may come from several threads at once
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(_loop,), daemon=True).start()
        return _loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
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
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(value, None), event_loop())
    try:
        return future.result(None if seconds == math.inf else seconds)
    except TimeoutError:
        if not future.cancel():
            raise
        raise TimeoutError(f"took longer than {seconds:g} s") from None


class Worker:
    """Threads that run calls in their order, each thread one at a time."""

    def __init__(self, threads: int = 1) -> None:
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Returns the future of a call, which begins after those before it."""
        future = Future[Any]()
        self._calls.put((future, function))
        return future

    def close(self) -> None:
        """Ends the threads after the queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (queued := self._calls.get()) is not None:
            _run(*queued)
        self._calls.put(None)  # for the other threads
