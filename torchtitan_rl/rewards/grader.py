"""The grader computes the rewards of groups of completions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import MANY, number
from torchtitan_rl.rewards.calls import AsyncCalls, RewardCall, results_of
from torchtitan_rl.rewards.reports import CallReports
from torchtitan_rl.rewards.reward import Reward
from torchtitan_rl.rewards.scorer import FailurePolicy, Scope, Scorer, ScorerResult
from torchtitan_rl.rewards.workers import WorkerPool
from torchtitan_rl.types import Completion, Group, Metric, ScoredCompletion, flat

ResultsOfCompletion = dict[Scorer, tuple[ScorerResult, int]]
"""One completion's results: for each scorer, the result of its call and the completion's index in that."""


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
        together, in a thread."""

        in_process: list[str] = field(default_factory=list)
        """Names of reward functions that run in the training process after sampling, because they hold a model on the
        GPU or share memory with the run; "judgement" is the task's. They have no time limit: the watchdog names one
        that hangs."""

    def __init__(self, config: Config, *, scorers: dict[str, list[Scorer]]) -> None:
        """Start the workers, which inherit this process's state. Call it before there are threads; the caller closes it.

        `scorers`: of each member of the task, by name, as `find_scorers` returns them.
        """
        self.scorers = scorers
        unique = dict.fromkeys(scorer for of_task in scorers.values() for scorer in of_task)
        names = dict.fromkeys(scorer.name for scorer in unique if isinstance(scorer, Reward))
        self.reward_names: list[str] = list(names)
        # The place of a scorer's function among those of the workers.
        self._function_idx: dict[Scorer, int] = {scorer: i for i, scorer in enumerate(unique)}
        self._in_process = set(config.in_process)
        self._async_calls = AsyncCalls()
        self._workers = WorkerPool([scorer.run for scorer in unique], config.workers)
        self.reports = CallReports()

    def round(self, state: Any = None) -> "GradingRound":
        """Returns a grading round for groups that are sampled together. It can begin before the last group ends."""
        return GradingRound(self, state)

    def grade(
        self, groups: Sequence[Group[Completion]], *, state: Any = None
    ) -> list[Group[ScoredCompletion]]:
        """Grade groups that have all been sampled, in one round. Returns and raises like `GradingRound.scored_groups`."""
        grading = self.round(state)
        for group in groups:
            grading.begin(group)
        return grading.scored_groups()

    def close(self) -> None:
        self._workers.close()
        self._async_calls.close()

    def drain_metrics(self) -> list[tuple[str, Metric]]:
        """Returns this rank's metrics of reward functions since the last drain, as (key, one call's value).

        The keys are `extra/<function>/<name>` and `reward/<function>/seconds` for means, and
        `extra/<function>/<name>/non_finite` and `reward/<function>/failures` for sums.
        """
        drained, self.reports.metrics = self.reports.metrics, []
        return drained

    def start(self, scorer: Scorer, groups: list[Group[Completion]], state: Any) -> RewardCall:
        """Returns a call of the scorer with all the groups, started unless it runs in this process."""
        future = None
        if scorer.is_async:
            future = self._async_calls.submit(scorer, groups, state)
        elif scorer.name not in self._in_process:
            function, seconds = self._function_idx[scorer], scorer.time_limit_seconds
            future = self._workers.submit(function, groups, state, seconds=seconds)
        return RewardCall(scorer, groups, state, future)


class GradingRound:
    """Grades the groups that one replica samples together."""

    def __init__(self, grader: Grader, state: Any) -> None:
        self._grader, self._state = grader, state
        self._groups: list[Group[Completion]] = []
        self._calls: list[RewardCall] = []

    def begin(self, group: Group[Completion]) -> None:
        """Start a group's calls, without waiting, while other groups are still being sampled."""
        self._groups.append(group)
        for scorer in self._grader.scorers[group.prompt.task]:
            if scorer.scope == "group" and group.samples:
                self._calls.append(self._grader.start(scorer, [group], self._state))

    def scored_groups(self) -> list[Group[ScoredCompletion]]:
        """Wait for all calls. Returns the groups with their rewards, in the order of their prompts.

        A reward is the weighted sum of the functions' scores. A function that returns None for a completion is left
        out of its sum, and one of weight 0 out of every sum. A completion for which a function of another weight failed has
        no reward, because the sum of the others is not comparable.

        Raises RewardError if a function with policy "raise" failed, or no completion got a reward too many times in a row.
        """
        grader = self._grader
        groups = sorted(self._groups, key=lambda group: group.prompt.prompt_idx)
        batches: dict[Scorer, list[Group[Completion]]] = {}
        for group in groups:
            for scorer in grader.scorers[group.prompt.task]:
                if scorer.scope == "batch" and group.samples:
                    batches.setdefault(scorer, []).append(group)
        for scorer, batch in batches.items():
            self._calls.append(grader.start(scorer, batch, self._state))
        # In the prompts' order, so that the failure that is named does not depend on which call ended first.
        self._calls.sort(key=lambda call: call.groups[0].prompt.prompt_idx)
        by_completion: defaultdict[Completion, ResultsOfCompletion] = defaultdict(dict)
        for call, result in zip(self._calls, results_of(self._calls), strict=True):
            for i, completion in enumerate(flat(call.groups)):
                by_completion[completion][call.scorer] = result, i
            grader.reports.check_call(call, result)
        scored = []
        for group in groups:
            scorers = grader.scorers[group.prompt.task]
            samples = [_with_reward(each, scorers, by_completion[each]) for each in group.samples]
            scored.append(Group(prompt=group.prompt, samples=samples))
        grader.reports.check_round(scored)
        return scored


def _with_reward(
    completion: Completion, scorers: Sequence[Scorer], results: ResultsOfCompletion
) -> ScoredCompletion:
    """The completion with its reward: the weighted sum of the scores; None without one that counts, or after a failure that does."""
    breakdown: dict[str, float | None] = {}
    extra: dict[str, Any] = {}
    weighted: list[float] = []
    failed = completion.error is not None
    if failed:
        extra["error/environment"] = completion.error
    *rewards, judgement = scorers
    for scorer in rewards:
        result, place = results[scorer]
        score = result.scores[place]
        breakdown[scorer.name] = score
        if score is not None and scorer.weight != 0:
            weighted.append(scorer.weight * score)
        for column, values in result.log.extras.items():
            extra[f"{scorer.name}/{column}"] = values[place]
        if place in result.errors:
            extra[f"error/{scorer.name}"] = result.errors[place]
            failed = failed or scorer.weight != 0
    judged, place = results[judgement]  # its score is (answer, correct)
    answer, correct = judged.scores[place] or (None, None)
    turn_weight = sum(scorer.weight for scorer in rewards if scorer.of_turns)
    return ScoredCompletion(
        completion=completion,
        reward=sum(weighted) if weighted and not failed else None,
        reward_breakdown=breakdown,
        extra=extra,
        answer=answer,
        correct=correct,
        turn_rewards=tuple(turn_weight * (turn.reward or 0.0) for turn in completion.turns),
    )
