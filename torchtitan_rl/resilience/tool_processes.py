"""Runs tools in worker processes, so that a call that never returns can be killed."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl.core.errors import expect
from torchtitan_rl.resilience.workers import WorkerPool


def in_processes(tools: Sequence[Callable[..., Any]], size: int, *, seconds: float = 10.0) -> list[Callable[..., Any]]:
    """Wrap tools so that their calls run in up to `size` processes. A call that takes longer than `seconds` is killed.

    Call this once, in the task's `__init__`: the processes are forked from this one. A tool changes only the state of its own
    process. Arguments and results must be picklable.

    Raises:
        UserError: for a coroutine function, which has its own time limit.
    """
    for tool in tools:
        expect(
            not inspect.iscoroutinefunction(tool), "in_processes", tool.__name__, "functions",
            "Leave coroutine functions as they are: their time limit cancels them.",
        )  # fmt: skip
    pool = WorkerPool([lambda arguments, tool=tool: tool(**arguments) for tool in tools], size)

    def in_worker(index: int) -> Callable[..., Any]:
        @functools.wraps(tools[index])
        def call(**arguments: Any) -> Any:
            return pool.submit(index, arguments, seconds=seconds).result()

        return call

    return [in_worker(index) for index in range(len(tools))]
