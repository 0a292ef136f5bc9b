"""Many calls at once: async ones wait together, worker processes compute beside them, the rest takes its turn here."""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torchtitan_rl.core.grading.reward import FAILURES, Judgement, Outcome, Reward, TrainerState, described
from torchtitan_rl.core.grading.time_limit import call_with_time_limit
from torchtitan_rl.core.types import Completion, Group
from torchtitan_rl.resilience.workers import WorkerPool

WHOSE = "reward functions"
"""Output that is bounded together, printed here or in workers. See `observability.printed`."""

_BLOCKED_SECONDS = 5.0
"""After the longest limit: how long coroutines may hold up each other before the one that runs is ended."""


class Call(NamedTuple):
    """A reward function, or the task's judgement, and the group it is asked about."""

    scorer: Reward | Judgement
    group: Group[Completion]


class Calls:
    """Runs calls of given scorers; which finishes first changes nothing in what comes back."""

    def __init__(self, scorers: Sequence[Reward | Judgement], *, workers: int, in_process: Sequence[str]) -> None:
        """With `workers`, fork the pool that the scorers run in, but those that are async or named by `in_process`."""
        self._places = {id(scorer): place for place, scorer in enumerate(scorers)}
        self._in_process = set(in_process)
        self._pool = WorkerPool([scorer.run for scorer in scorers], workers, whose=WHOSE) if workers else None
        self._begun: dict[tuple[int, int], _Begun] = {}

    def begin(self, calls: Sequence[Call], state: TrainerState) -> None:
        """Hand those that have workers to them, and return; `run` collects what they answer."""
        for call in calls:
            if self._has_worker(call) and _key(call) not in self._begun:
                self._begun[_key(call)] = _Begun(call, self._submit(call, state))

    def run(self, calls: Sequence[Call], state: TrainerState) -> list[Outcome]:
        """Their outcomes, in their order. What was begun and is not among them is given up."""
        self._give_up_all_but(calls)
        self.begin(calls, state)
        waiting = [i for i, call in enumerate(calls) if call.scorer.is_async]
        away = [i for i, call in enumerate(calls) if self._has_worker(call)]
        here = [i for i in range(len(calls)) if i not in {*waiting, *away}]
        outcomes = dict(zip(waiting, _together([calls[i] for i in waiting], state), strict=True))
        outcomes |= {i: calls[i].scorer.run(calls[i].group, state) for i in here}
        outcomes |= {i: self._begun.pop(_key(calls[i])).outcome() for i in away}
        return [outcomes[i] for i in range(len(calls))]

    def close(self) -> None:
        """End the worker processes."""
        if self._pool:
            self._pool.close()

    def _has_worker(self, call: Call) -> bool:
        return self._pool is not None and not call.scorer.is_async and call.scorer.name not in self._in_process

    def _submit(self, call: Call, state: TrainerState) -> "Future[Outcome]":
        place, seconds = self._places[id(call.scorer)], call.scorer.time_limit_seconds
        return self._pool.submit(place, call.group, state, False, seconds=seconds)

    def _give_up_all_but(self, calls: Sequence[Call]) -> None:
        """What nobody collects, as the groups of a sampling that failed: no worker starts on it any more."""
        for key in self._begun.keys() - set(map(_key, calls)):
            self._begun.pop(key).future.cancel()


class _Begun(NamedTuple):
    """A call that a worker has, or will have."""

    call: Call
    """Kept, so that no other scorer or group has its identity meanwhile."""
    future: "Future[Outcome]"

    def outcome(self) -> Outcome:
        """What the worker made of it, or why none could."""
        try:
            return self.future.result()
        except FAILURES as error:
            return Outcome.failed(len(self.call.group.samples), described(error))


def _key(call: Call) -> tuple[int, int]:
    """Scorers and groups are told apart by identity: they need not be hashable, and an evaluation asks prompts again."""
    return id(call.scorer), id(call.group)


def _together(calls: Sequence[Call], state: TrainerState) -> list[Outcome]:
    """All async calls in one event loop."""
    if not calls:
        return []
    outcomes = [
        Outcome.failed(len(call.group.samples), "TimeoutError: it does not let itself be cancelled") for call in calls
    ]

    async def one(place: int) -> None:
        outcomes[place] = await calls[place].scorer.run_async(calls[place].group, state)

    async def every() -> None:
        await asyncio.gather(*map(one, range(len(calls))))

    limits = [call.scorer.time_limit_seconds for call in calls]
    with contextlib.suppress(TimeoutError):  # then those that would not end have failed
        call_with_time_limit(lambda: asyncio.run(every()), max(limits) + _BLOCKED_SECONDS if all(limits) else 0)
    return outcomes
