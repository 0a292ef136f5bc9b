"""What follows from calls of reward functions: their metrics, warnings, and the errors that end a run."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torchtitan_rl.rewards.calls import RewardCall
from torchtitan_rl.rewards.scorer import RewardError, ScorerResult
from torchtitan_rl.types import Group, Metric, ScoredCompletion, flat

logger = logging.getLogger(__name__)

_REMEDIES = {
    "function": "Expected one finite float (at most 1e18) or None for each completion. Correct the function",
    "time limit": "Make it faster, raise grader.time_limit_seconds_of",
    "killed": "The signal came from outside the function: from a person, a batch system or, if memory ran out, the kernel. "
    "Start the same command again (against a lack of memory, with fewer grader.workers)",
}
"""What to do after a failed call, by its cause."""

MOST_FAILED_ROUNDS = 3
"""The run stops when all scores have failed this many times in a row with on_failure "none"."""


class CallReports:
    """Metrics, warnings and errors after calls of one grader. It warns once of each function that fails."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, Metric]] = []
        """Those of the calls since the last drain: see `Grader.drain_metrics`."""
        self._warned: set[str] = set()
        self._failed_rounds = 0

    def check_round(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
        """Warn if scoring failed for every completion. Raises RewardError after MOST_FAILED_ROUNDS times in a row."""
        errors = [_error_of(sample) for sample in flat(groups)]
        if not errors:
            return
        if not all(errors):
            self._failed_rounds = 0
            return
        self._failed_rounds += 1
        shown = f"No completion got a reward: all {len(errors)} failed, such as {errors[0]}"
        logger.warning(shown)
        if self._failed_rounds == MOST_FAILED_ROUNDS:
            effect = f"{MOST_FAILED_ROUNDS} times in a row: nothing is being learned"
            raise RewardError(f"{shown}, {effect}. Correct it.")

    def check_call(self, call: RewardCall, result: ScorerResult) -> None:
        """Keep a call's metrics, and warn of its failure. Raises RewardError if its policy is "raise"."""
        scorer, name = call.scorer, call.scorer.name
        self.metrics += call_metrics(name, result)
        if result.log.error:
            called = f"Reward function {name!r} called {result.log.error}."
            self._warn_once(f"log of {name}", f"{called} This logging is dropped.")
        if not result.errors:
            return
        index, message = next(iter(result.errors.items()))
        prompts = [group.prompt for group in call.groups for _ in group.samples]
        batch = f" (in a batch of {len(call.groups)} prompts)" if len(call.groups) > 1 else ""
        shown = f"Reward function {name!r} failed on prompt {prompts[index].text[:80]!r}{batch}: {message}."
        if scorer.on_failure == "raise":
            raise RewardError(
                f"{shown} {_REMEDIES[result.cause]}, or set grader.on_failure_of to {{{name!r}: 'none'}} to go on "
                "without a reward for such completions."
            )
        lost = "reward" if scorer.weight else "value of it"
        self._warn_once(
            f"failure of {name}",
            f"{shown} Such completions get no {lost}: see reward/{name}/failures.",
        )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def _error_of(sample: ScoredCompletion) -> str:
    """The name and message of the sample's first error, if it has no reward because of it; "" otherwise."""
    if sample.reward is None:
        for column, value in sample.extra.items():
            if column.startswith("error/"):
                return f"{column}: {value}"
    return ""


def call_metrics(name: str, result: ScorerResult) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics of one call of the function `name`: what it recorded and logged, its duration, and how many scores failed.

    Each logged name has the number of the call's completions as its weight in total.
    """
    yield from result.log.recorded
    times = Counter(metric for metric, _ in result.log.metrics)
    for metric, value in result.log.metrics:
        if math.isfinite(value):
            weight = len(result.scores) / times[metric]
            yield f"extra/{name}/{metric}", Metric(value, weight=weight)
        else:
            yield f"extra/{name}/{metric}/non_finite", Metric(1.0, "sum")
    yield f"reward/{name}/seconds", Metric(result.seconds)
    if result.errors:
        yield f"reward/{name}/failures", Metric(len(result.errors), "sum")
