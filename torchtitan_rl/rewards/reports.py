"""What follows from calls of reward functions: their metrics, warnings, and the errors that end a run."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torchtitan_rl.rewards.calls import RewardCall
from torchtitan_rl.rewards.scorer import RewardError
from torchtitan_rl.types import Completion, Group, Metric, Prompt, ScoredCompletion, flat

logger = logging.getLogger(__name__)

_AFTER_FAILURE = (
    "Expected one finite float (at most 1e18) or None for each completion. Correct the function"
)
_AFTER_KILL = (
    "The signal came from outside the function: from a person, a batch system or, if memory ran out, the kernel. "
    "Start the same command again (against a lack of memory, with fewer grader.workers)"
)
_AFTER_TIMEOUT = "Make it faster, raise grader.time_limit_seconds_of"
"""Remedies for a failed call."""

MOST_FAILED_ROUNDS = 3
"""The run stops when all scores have failed this many times in a row with on_failure "none"."""


class CallReports:
    """`rewards.grader.Reports` of one grader. It warns once of each function that fails."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._failed_rounds = 0

    def of_round(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
        """Warn if scoring failed for every completion. Raises RewardError after MOST_FAILED_ROUNDS times in a row."""
        samples = flat(groups)
        if not samples:
            return
        errors = [_error_of(sample) for sample in samples]
        if not all(errors):
            self._failed_rounds = 0
            return
        self._failed_rounds += 1
        shown = f"No completion got a reward: all {len(samples)} failed, such as {errors[0]}"
        logger.warning(shown)
        if self._failed_rounds == MOST_FAILED_ROUNDS:
            raise RewardError(
                f"{shown}, {MOST_FAILED_ROUNDS} times in a row: nothing is being learned. Correct it."
            )

    def of_call(self, call: RewardCall) -> Iterator[tuple[str, Metric]]:
        """Yields a call's metrics, then reports its failure. Raises RewardError if its policy is "raise"."""
        scorer = call.scorer
        result = call.result
        name = scorer.name
        if result.log_error:
            self._warn_once(f"log of {name}", f"{result.log_error} This logging is dropped.")
        asked: list[tuple[Prompt, Completion]] = []
        for group in call.groups:
            asked += [(group.prompt, completion) for completion in group.samples]
        yield from result.recorded
        yield from _call_metrics(
            name,
            result.metrics,
            num_completions=len(asked),
            seconds=result.seconds,
            num_failed=len(result.errors),
        )
        if not result.errors:
            return
        first, message = next(iter(result.errors.items()))
        prompt, completion = asked[first]
        if message.startswith("returned"):
            message += f" for completion {completion.sample_idx} ({completion.text[:80]!r})"
        batch = f" (in a batch of {len(call.groups)} prompts)" if len(call.groups) > 1 else ""
        described = (
            f"Reward function {name!r} failed on prompt {prompt.text[:80]!r}{batch}: {message}."
        )
        if scorer.on_failure == "raise":
            remedy = _AFTER_KILL if result.worker_killed else _AFTER_FAILURE
            if message.startswith("TimeoutError: took longer"):
                remedy = _AFTER_TIMEOUT
            raise RewardError(
                f"{described} {remedy}, or set grader.on_failure_of to {{{name!r}: 'none'}} to go on "
                "without a reward for such completions."
            )
        lost = "reward" if scorer.weight else "value of it"
        self._warn_once(
            f"failure of {name}",
            f"{described} Such completions get no {lost}: see reward/{name}/failures.",
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


def _call_metrics(
    function: str,
    metrics: Sequence[tuple[str, float]],
    *,
    num_completions: int,
    seconds: float,
    num_failed: int,
) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics of one call: the values that `function` logged, its duration, and how many scores failed.

    Each logged name has the weight `num_completions` in total.
    """
    times = Counter(name for name, _ in metrics)
    for name, value in metrics:
        if math.isfinite(value):
            yield f"extra/{function}/{name}", Metric(value, weight=num_completions / times[name])
        else:
            yield f"extra/{function}/{name}/non_finite", Metric(1.0, "sum")
    yield f"reward/{function}/seconds", Metric(seconds)
    if num_failed:
        yield f"reward/{function}/failures", Metric(num_failed, "sum")
