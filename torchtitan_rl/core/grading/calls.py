"""Where a call of a reward function runs: in a worker process, in one event loop with others, or in the training process."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl.core.grading.reward import Judgement, Reward, RewardResult, TrainerState
from torchtitan_rl.core.types import Completion, Group

_CANCEL_SECONDS = 5.0
"""How long coroutines may take to end after the longest time limit, before they are given up."""


class Workers(Protocol):
    """Processes that call functions. `resilience.workers.WorkerPool` is one."""

    def submit_all(self, calls: Sequence[tuple[int, float]], *args: Any) -> "list[Future[Any]]":
        """Call functions with the same arguments, one after another: (place, seconds).

        A call that takes longer than `seconds` (0: no limit) is killed, and its future raises TimeoutError.
        """

    def close(self) -> None:
        """End the processes."""


StartWorkers = Callable[..., Workers]
"""Starts `size` processes that know some functions: start(functions, size, whose="reward functions")."""


@dataclass(slots=True)
class RewardCall:
    """A reward function, or the task's judgement, asked about one group."""

    scorer: Reward | Judgement
    group: Group[Completion]
    state: TrainerState
    future: "Future[RewardResult] | None" = None
    """The worker's answer, once it has it; None: it does not run in a worker."""
    result: RewardResult | None = None


def finish(calls: Sequence[RewardCall]) -> None:
    """Fill in the result of every call. Async functions wait together; what runs in this process takes its turn."""
    _run_together([call for call in calls if call.future is None and call.scorer.is_async])
    for call in calls:
        if call.future is not None:
            call.result = _from_worker(call)
        elif not call.scorer.is_async:
            call.result = call.scorer.run(call.group, call.state)


def _from_worker(call: RewardCall) -> RewardResult:
    try:
        return call.future.result()
    except Exception as error:  # the worker was killed or died, or the group or the result cannot be pickled
        return RewardResult.failed(len(call.group.samples), f"{type(error).__name__}: {error}")


def _run_together(calls: Sequence[RewardCall]) -> None:
    """Run async calls in one event loop, in a thread that is given up if a coroutine blocks it."""
    if not calls:
        return
    results: dict[int, RewardResult] = {}

    async def one(place: int) -> None:
        results[place] = await calls[place].scorer.run_async(calls[place].group, calls[place].state)

    async def every() -> None:
        await asyncio.gather(*map(one, range(len(calls))))

    limits = [call.scorer.time_limit_seconds for call in calls]
    thread = threading.Thread(target=lambda: asyncio.run(every()), name="async rewards", daemon=True)
    thread.start()
    thread.join(max(limits) + _CANCEL_SECONDS if all(limits) else None)
    for call, found in zip(calls, [results.get(place) for place in range(len(calls))], strict=True):
        message = f"TimeoutError: took longer than {call.scorer.time_limit_seconds:g} s and cannot be cancelled"
        call.result = found or RewardResult.failed(len(call.group.samples), message)
