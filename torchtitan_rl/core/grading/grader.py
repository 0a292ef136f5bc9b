"""The grader computes the rewards of groups of completions."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.core.config import MANY, number
from torchtitan_rl.core.grading.calls import ResultsOfCompletion, RewardCall, StartWorkers, finish
from torchtitan_rl.core.grading.scorer import (
    FailurePolicy,
    RewardError,
    RewardScorer,
    Scope,
    Scorer,
    TrainerState,
)
from torchtitan_rl.core.types import Completion, Group, Metric, Prompt, ScoredCompletion, flat

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


@dataclass(frozen=True, slots=True)
class Scorers:
    """The scorers of one task: its own reward functions, those of the config, and its judgement."""

    rewards: list[RewardScorer]
    judgement: Scorer

    @property
    def all(self) -> list[Scorer]:
        return [*self.rewards, self.judgement]


class Grader(Configurable):
    """Scores completions with the task's and the config's reward functions, on the first rank of the replica that sampled them.

    The grader does not communicate. Its results are the scored completions and the metrics of `drain_metrics`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        rewards: list[str] = field(
            default_factory=list,
            metadata={"remedy": 'Name each in a text, as "path/to/file.py:function".'},
        )
        """Reward functions besides the task's own, as path/to/file.py:function or package.module:function."""

        weights: dict[str, float] = number(
            {}, least=-MANY, most=MANY, remedy='Use {"NAME": NUMBER}; 0 only watches.'
        )
        """Weights of reward functions in the sum, by name. The default weight is 1."""

        on_failure: FailurePolicy = "raise"
        """Policy for a reward function that raises, takes too long or returns an invalid score. "raise" stops the
        run; "none" leaves these completions without a reward: excluded from the baseline, advantage 0, counted and
        shown. A function of weight 0 takes no reward with it."""

        on_failure_of: dict[str, FailurePolicy] = field(default_factory=dict)
        """`on_failure` of individual reward functions, by name."""

        scope_of: dict[str, Scope] = field(default_factory=dict)
        """What one call of a reward function scores, by name: "group", one prompt's completions (default), or
        "batch", all completions of the step on a replica. It replaces the function's attribute `scope`."""

        time_limit_seconds: float = number(60.0, least=0, remedy="Use 0 for no limit.")
        """Time limit for one call of a reward function; 0 means no limit."""

        time_limit_seconds_of: dict[str, float] = number({}, least=0, remedy="Use 0 for no limit.")
        """`time_limit_seconds` of individual reward functions, by name."""

        workers: int = number(1, least=1, most=1024)
        """Processes per generator replica in which reward functions and the task's judgement run while other groups
        are still being sampled. A call over its time limit is killed. Async functions need no worker: they wait
        together."""

        in_process: list[str] = field(default_factory=list)
        """Names of reward functions that run in the training process after sampling, because they hold a model on the
        GPU or share memory with the run; "judgement" is the task's. They have no time limit: the watchdog names one
        that hangs."""

    def __init__(
        self, config: Config, *, scorers: dict[str, Scorers], start_workers: StartWorkers
    ) -> None:
        """
        Args:
            scorers: the scorers of each member of the task, by name. `setup.build_grader` builds them.
            start_workers: called once, with the functions that workers run. Workers inherit this process's state at
                that time.
        """
        self._scorers = scorers
        self.reward_names: list[str] = []
        # The place of a scorer's function among those of the workers.
        self._function_idx: dict[Scorer, int] = {}
        for of_task in scorers.values():
            for reward in of_task.rewards:
                if reward.name not in self.reward_names:
                    self.reward_names.append(reward.name)
            for scorer in of_task.all:
                self._function_idx.setdefault(scorer, len(self._function_idx))
        self._in_process = set(config.in_process)
        self._workers = start_workers([scorer.run for scorer in self._function_idx], config.workers)
        self._metrics: list[tuple[str, Metric]] = []
        self._warned: set[str] = set()
        self._failed_rounds = 0

    def round(self, state: TrainerState | None = None) -> "GradingRound":
        """Returns a grading round for groups that are sampled together. It can begin before the last group ends."""
        return GradingRound(self, state or TrainerState())

    def grade(
        self, groups: Sequence[Group[Completion]], *, state: TrainerState | None = None
    ) -> list[Group[ScoredCompletion]]:
        """Grade groups that have all been sampled, in one round. Returns and raises like `GradingRound.scored_groups`."""
        round = self.round(state)
        for group in groups:
            round.begin(group)
        return round.scored_groups()

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def drain_metrics(self) -> list[tuple[str, Metric]]:
        """Returns this rank's metrics of reward functions since the last drain, as (key, one call's value).

        The keys are `extra/<function>/<name>` and `reward/<function>/seconds` for means, and
        `extra/<function>/<name>/non_finite` and `reward/<function>/failures` for sums.
        """
        drained = self._metrics
        self._metrics = []
        return drained

    def scorers(self, group: Group[Completion], scope: Scope) -> list[Scorer]:
        """Returns the scorers of a group with this scope: the task's rewards in order, then the judgement."""
        if not group.samples:
            return []
        of_task = self._scorers[group.prompt.task].all
        return [scorer for scorer in of_task if scorer.scope == scope]

    def start(
        self, scorers: list[Scorer], groups: list[Group[Completion]], state: TrainerState
    ) -> list[RewardCall]:
        """Returns one call of each scorer with all the groups. Those that run in a worker are started, one after
        another."""
        calls = [RewardCall(scorer, groups, state) for scorer in scorers]
        in_workers: list[RewardCall] = []
        functions: list[tuple[int, float]] = []  # index and time limit of each
        for call in calls:
            scorer = call.scorer
            if not scorer.is_async and scorer.name not in self._in_process:
                in_workers.append(call)
                functions.append((self._function_idx[scorer], scorer.time_limit_seconds))
        futures = self._workers.submit_all(functions, groups, state)
        for call, future in zip(in_workers, futures, strict=True):
            call.future = future
        return calls

    def stop_if_all_fail(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
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

    def report(self, call: RewardCall) -> None:
        """Add a call's metrics and report its failure. Raises RewardError if its policy is "raise"."""
        scorer = call.scorer
        result = call.result
        name = scorer.name
        if result.log_error:
            self._warn_once(f"log of {name}", f"{result.log_error} This logging is dropped.")
        asked: list[tuple[Prompt, Completion]] = []
        for group in call.groups:
            asked += [(group.prompt, completion) for completion in group.samples]
        self._metrics += _call_metrics(
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

    def with_rewards(
        self, group: Group[Completion], results: Mapping[Completion, ResultsOfCompletion]
    ) -> Group[ScoredCompletion]:
        """Returns the group with its rewards, given the results of its completions."""
        scorers = self._scorers[group.prompt.task]
        samples = [_with_reward(one, scorers, results[one]) for one in group.samples]
        return Group(prompt=group.prompt, samples=samples)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


class GradingRound:
    """Grades the groups that one replica samples together."""

    def __init__(self, grader: Grader, state: TrainerState) -> None:
        self._grader, self._state = grader, state
        self._groups: list[Group[Completion]] = []
        self._calls: list[RewardCall] = []

    def begin(self, group: Group[Completion]) -> None:
        """Start a group's calls in the workers, without waiting, while other groups are still being sampled."""
        self._groups.append(group)
        self._calls += self._grader.start(
            self._grader.scorers(group, "group"), [group], self._state
        )

    def scored_groups(self) -> list[Group[ScoredCompletion]]:
        """Wait for all calls. Returns the groups with their rewards, in the order of their prompts.

        A reward is the weighted sum of the functions' scores. A function that returns None for a completion is left
        out of its sum. A completion for which a function failed has no reward, because the sum of the others is not
        comparable, unless the function's weight is 0. Raises RewardError if a function with policy "raise" fails, or
        if all have failed MOST_FAILED_ROUNDS times in a row.
        """
        grader = self._grader
        groups = sorted(self._groups, key=lambda group: group.prompt.prompt_idx)
        batches: dict[Scorer, list[Group[Completion]]] = {}
        for group in groups:
            for scorer in grader.scorers(group, "batch"):
                batches.setdefault(scorer, []).append(group)
        for scorer, batch in batches.items():
            self._calls += grader.start([scorer], batch, self._state)
        # In the prompts' order, so that the failure that is named does not depend on which call ended first.
        self._calls.sort(key=lambda call: call.groups[0].prompt.prompt_idx)
        results = finish(self._calls)
        for call in self._calls:
            grader.report(call)
        scored = [grader.with_rewards(group, results) for group in groups]
        grader.stop_if_all_fail(scored)
        return scored


def _error_of(sample: ScoredCompletion) -> str:
    """The name and message of the sample's first error, if it has no reward because of it; "" otherwise."""
    if sample.reward is None:
        for column, value in sample.extra.items():
            if column.startswith("error/"):
                return f"{column}: {value}"
    return ""


def _with_reward(
    completion: Completion, scorers: Scorers, results: ResultsOfCompletion
) -> ScoredCompletion:
    """The completion with its reward: the weighted sum of the scores; None without one, or after a failure that counts."""
    breakdown: dict[str, float | None] = {}
    extra: dict[str, Any] = {}
    weighted: list[float] = []
    failed = completion.error is not None
    if failed:
        extra["error/environment"] = completion.error
    for scorer in scorers.rewards:
        result, place = results[scorer]
        score = result.scores[place]
        breakdown[scorer.name] = score
        if score is not None:
            weighted.append(scorer.weight * score)
        for column, values in result.extras.items():
            extra[f"{scorer.name}/{column}"] = values[place]
        if place in result.errors:
            extra[f"error/{scorer.name}"] = result.errors[place]
            failed = failed or scorer.weight != 0
    judged, place = results[scorers.judgement]  # its score is (answer, correct)
    answer, correct = judged.scores[place] or (None, None)
    turn_weight = sum(scorer.weight for scorer in scorers.rewards if scorer.of_turns)
    return ScoredCompletion(
        completion=completion,
        reward=sum(weighted) if weighted and not failed else None,
        reward_breakdown=breakdown,
        extra=extra,
        answer=answer,
        correct=correct,
        turn_rewards=tuple(turn_weight * (turn.reward or 0.0) for turn in completion.turns),
    )


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
