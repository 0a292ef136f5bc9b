"""Tools in processes of their own: a call that never returns, or never lets go of the interpreter, is killed."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl.core.errors import expect
from torchtitan_rl.resilience.workers import WorkerPool


def in_processes(tools: Sequence[Callable[..., Any]], size: int, *, seconds: float = 10.0) -> list[Callable[..., Any]]:
    """The same tools, whose calls run in up to `size` processes. One that takes longer than `seconds` is killed.

    Make them once, in the task's `__init__`: the processes are copies of this one as it is then. What a tool changes, it changes
    in its own process; arguments and results go there and back by pickle.

    Raises:
        UserError: for a coroutine function, which its own time limit ends.
    """
    for tool in tools:
        expect(
            not inspect.iscoroutinefunction(tool), "in_processes", tool.__name__, "functions",
            "Leave coroutine functions as they are: their time limit cancels them.",
        )  # fmt: skip
    pool = WorkerPool([functools.partial(_call, tool) for tool in tools], size)

    def away(place: int) -> Callable[..., Any]:
        @functools.wraps(tools[place])
        def call(**arguments: Any) -> Any:
            return pool.submit(place, arguments, seconds=seconds).result()

        return call

    return [away(place) for place in range(len(tools))]


def _call(tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return tool(**arguments)
