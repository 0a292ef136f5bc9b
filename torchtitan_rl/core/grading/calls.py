"""Calls of reward functions: in a worker process, in a shared event loop, or in the training process."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl.core.errors import WorkerKilled
from torchtitan_rl.core.grading.scorer import Groups, Scorer, ScorerResult
from torchtitan_rl.core.types import Completion, flat

_CANCEL_SECONDS = 5.0
"""Time that coroutines have to end after the longest time limit. After that they are abandoned."""


class Workers(Protocol):
    """A pool of processes that call functions, such as `resilience.workers.WorkerPool`."""

    def submit_all(self, calls: Sequence[tuple[int, float]], *args: Any) -> "list[Future[Any]]":
        """Call functions with the same arguments, one after another. Each call is (index of the function, seconds).

        A call that takes longer than `seconds` is killed, and its future raises TimeoutError; 0 means no limit. The
        future of a call whose worker was killed from outside raises WorkerKilled.
        """

    def close(self) -> None:
        """End the processes."""


StartWorkers = Callable[..., Workers]
"""Starts `size` processes that can call `functions`: start(functions, size)."""


@dataclass(slots=True)
class RewardCall:
    """One call of a reward function, or of the task's judgement."""

    scorer: Scorer
    groups: Groups
    """The completions that the call scores: one group, or those of a batch."""
    state: Any
    future: "Future[ScorerResult] | None" = None
    """The worker's result; None if the call does not run in a worker."""
    result: ScorerResult | None = None


ResultsOfCompletion = dict[Scorer, tuple[ScorerResult, int]]
"""One completion's results: for each scorer, the result of its call and the completion's index in that."""


def finish(calls: Sequence[RewardCall]) -> dict[Completion, ResultsOfCompletion]:
    """Set the result of every call, and return those of each completion, which is a key by its identity.

    Async functions wait together; others that run in this process run one by one.
    """
    _run_together([call for call in calls if call.future is None and call.scorer.is_async])
    for call in calls:
        if call.future is not None:
            call.result = _from_worker(call)
        elif not call.scorer.is_async:
            call.result = call.scorer.run(call.groups, call.state)
    results: defaultdict[Completion, ResultsOfCompletion] = defaultdict(dict)
    for call in calls:
        for i, completion in enumerate(flat(call.groups)):
            results[completion][call.scorer] = call.result, i
    return results


def _from_worker(call: RewardCall) -> ScorerResult:
    try:
        return call.future.result()
    except Exception as error:
        # The worker was killed or died, or the groups or the result cannot be pickled.
        seconds = call.scorer.time_limit_seconds if isinstance(error, TimeoutError) else 0.0
        result = ScorerResult.failed(
            len(flat(call.groups)), f"{type(error).__name__}: {error}", seconds
        )
        result.worker_killed = isinstance(error, WorkerKilled)
        return result


def _run_together(calls: Sequence[RewardCall]) -> None:
    """Run async calls in one event loop, in a thread that is abandoned if a coroutine blocks it."""
    if not calls:
        return
    results: dict[int, ScorerResult] = {}

    async def run(index: int, call: RewardCall) -> None:
        results[index] = await call.scorer.run_async(call.groups, call.state)

    async def run_all() -> None:
        runs = [run(index, call) for index, call in enumerate(calls)]
        await asyncio.gather(*runs)

    limits = [call.scorer.time_limit_seconds for call in calls]
    thread = threading.Thread(
        target=lambda: asyncio.run(run_all()), name="async rewards", daemon=True
    )
    thread.start()
    thread.join(max(limits) + _CANCEL_SECONDS if all(limits) else None)
    for index, call in enumerate(calls):
        if index in results:
            call.result = results[index]
        else:
            message = f"TimeoutError: took longer than {call.scorer.time_limit_seconds:g} s and cannot be cancelled"
            call.result = ScorerResult.failed(len(flat(call.groups)), message)
