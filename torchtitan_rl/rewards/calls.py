"""Calls of reward functions: in a worker process, in a shared event loop, or in the training process."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torchtitan_rl.rewards.scorer import Groups, Scorer, ScorerResult
from torchtitan_rl.rewards.workers import WorkerKilled
from torchtitan_rl.types import flat

_CANCEL_SECONDS = 5.0
"""Time that async functions have to end after the longest time limit. After that they are abandoned."""


class RewardCall(NamedTuple):
    """One call of a reward function, or of the task's judgement."""

    scorer: Scorer
    groups: Groups
    """The completions that the call scores: one group, or those of a batch."""
    state: Any
    future: "Future[ScorerResult] | None"
    """The result of a worker or an async function; None if the call runs in this process after sampling."""


class AsyncCalls:
    """An event loop in a thread of its own, in which async functions wait together while other groups are still being sampled."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, scorer: Scorer, groups: Groups, state: Any) -> "Future[ScorerResult]":
        """Start a call of an async function. The first one starts the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run_forever = self._loop.run_forever
            threading.Thread(target=run_forever, name="async rewards", daemon=True).start()
        result: Future[ScorerResult] = Future()

        async def run() -> None:
            # It sets the result itself: another coroutine may block the loop afterwards.
            result.set_result(await scorer.run_async(groups, state))

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return result

    def close(self) -> None:
        """End the thread, unless a coroutine blocks it: it is abandoned then."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


def results_of(calls: Sequence[RewardCall]) -> list[ScorerResult]:
    """Wait for every call. Functions that run in this process, and are not async, run one by one."""
    limits = [call.scorer.time_limit_seconds for call in calls if call.scorer.is_async]
    last = time.monotonic() + max(limits) + _CANCEL_SECONDS if limits and all(limits) else None
    return [_result(call, last) for call in calls]


def _result(call: RewardCall, last: float | None) -> ScorerResult:
    """The call's result. An async one has ended by the time `last` unless a coroutine blocks the loop; None: waits for ever."""
    scorer, size = call.scorer, len(flat(call.groups))
    if call.future is None:
        return scorer.run(call.groups, call.state)
    left = max(0.0, last - time.monotonic()) if scorer.is_async and last is not None else None
    try:
        return call.future.result(left)
    except TimeoutError:
        return scorer.timed_out(size, " and cannot be cancelled" if scorer.is_async else "")
    except Exception as error:  # the worker has ended, or something cannot be pickled
        cause = "killed" if isinstance(error, WorkerKilled) else "function"
        return ScorerResult.failed(size, f"{type(error).__name__}: {error}", cause=cause)
