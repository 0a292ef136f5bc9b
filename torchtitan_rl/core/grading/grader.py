"""The grader computes the rewards of groups of completions."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.core.config import number
from torchtitan_rl.core.events import output_of
from torchtitan_rl.core.generator.environment import environment_reward
from torchtitan_rl.core.grading.calls import RewardCall, StartWorkers, finish
from torchtitan_rl.core.grading.reward import FailurePolicy, Judgement, Reward, RewardError, RewardResult, TrainerState
from torchtitan_rl.core.grading.reward_log import call_metrics
from torchtitan_rl.core.types import Completion, Group, Metric, ScoredCompletion

logger = logging.getLogger(__name__)

WHOSE = "reward functions"
"""Name under which the printed output of all reward functions is limited, in this process and in the workers."""

MOST_FAILED_STEPS = 3
"""The run stops when all scores have failed this many times in a row with on_failure "none"."""


@dataclass(frozen=True, slots=True)
class Scorers:
    """The scorers of one task: its own reward functions, those of the config, and its judgement."""

    rewards: list[Reward]
    judgement: Judgement

    @property
    def all(self) -> list[Reward | Judgement]:
        return [*self.rewards, self.judgement]


class Grader(Configurable):
    """Scores completions with the task's and the config's reward functions, on the rank that generated them.

    The grader does not communicate. Its results are the scored completions and the metrics of `drain_metrics`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        rewards: list[str] = field(default_factory=list)
        """Reward functions besides the task's own, as path/to/file.py:function or package.module:function."""

        weights: dict[str, float] = number({}, above=-math.inf, below=math.inf, remedy="0 only watches a function.")
        """Weights of reward functions in the sum, by name. The default weight is 1."""

        on_failure: FailurePolicy = "raise"
        """Policy for a reward function that raises, takes too long or returns an invalid score. "raise" stops the run; "none"
        leaves these completions without a reward: excluded from the baseline, advantage 0, counted and shown."""

        on_failure_of: dict[str, FailurePolicy] = field(default_factory=dict)
        """`on_failure` of individual reward functions, by name."""

        time_limit_seconds: float = number(60.0, least=0, remedy="Use 0 for no limit.")
        """Time limit for one call of a reward function, which scores one prompt's group; 0 means no limit."""

        time_limit_seconds_of: dict[str, float] = number({}, least=0, remedy="Use 0 for no limit.")
        """`time_limit_seconds` of individual reward functions, by name."""

        workers: int = number(1, least=1, most=1024)
        """Processes per generator replica in which reward functions and the task's judgement run while other groups are still
        being sampled. A call over its time limit is killed. Async functions need no worker: they wait together."""

        in_process: list[str] = field(default_factory=list)
        """Names of reward functions that run in the training process after sampling, because they hold a model on the GPU or
        share memory with the run; "judgement" is the task's. They have no time limit: the watchdog names one that hangs."""

    def __init__(self, config: Config, *, scorers: dict[str, Scorers], start_workers: StartWorkers) -> None:
        """
        Args:
            scorers: the scorers of each member of the task, by name. `setup.build_grader` builds them.
            start_workers: called once, with the functions that workers run. Workers inherit this process's state at that time.
        """
        self._scorers = scorers
        self.reward_names = list(dict.fromkeys(r.name for one in scorers.values() for r in one.rewards))
        self._in_process = set(config.in_process)
        functions = {(name, i): scorer.run for name, one in scorers.items() for i, scorer in enumerate(one.all)}
        self._places = {key: place for place, key in enumerate(functions)}
        self._workers = start_workers(list(functions.values()), config.workers, whose=WHOSE)
        self._metrics: list[tuple[str, Metric]] = []
        self._warned: set[str] = set()
        self._failed_steps = 0

    def round(self, state: TrainerState | None = None) -> "GradingRound":
        """Returns a grading round for groups that are sampled together. It can begin before the last group ends."""
        return GradingRound(self, state or TrainerState())

    def score(
        self, groups: Sequence[Group[Completion]], *, state: TrainerState | None = None
    ) -> list[Group[ScoredCompletion]]:
        """Grade groups that have all been sampled, in one round. Returns and raises like `GradingRound.scores`."""
        round = self.round(state)
        for group in groups:
            round.begin(group)
        return round.scores()

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def drain_metrics(self) -> list[tuple[str, Metric]]:
        """Returns this rank's metrics of reward functions since the last drain, as (key, one call's value).

        The keys are `extra/<function>/<name>` and `reward/<function>/seconds` for means, and
        `extra/<function>/<name>/non_finite` and `reward/<function>/failures` for sums.
        """
        drained, self._metrics = self._metrics, []
        return drained

    def calls(self, group: Group[Completion], state: TrainerState) -> list[RewardCall]:
        """Start a group's calls in the workers. Returns all its calls: the task's rewards in order, then the judgement."""
        task = group.prompt.task
        calls = [RewardCall(scorer, group, state) for scorer in self._scorers[task].all if group.samples]
        away = {
            self._places[task, i]: call
            for i, call in enumerate(calls)
            if not call.scorer.is_async and call.scorer.name not in self._in_process
        }
        limits = [(place, call.scorer.time_limit_seconds) for place, call in away.items()]
        for call, future in zip(away.values(), self._workers.submit_all(limits, group, state), strict=True):
            call.future = future
        return calls

    def combine(self, group: Group[Completion], results: list[RewardResult]) -> Group[ScoredCompletion]:
        """Returns the group with its rewards, given the results of its calls. Raises RewardError if a policy is "raise"."""
        scorers = self._scorers[group.prompt.task]
        for scorer, result in zip(scorers.all, results):
            self._report(scorer, result, group)
        samples = [self._scored(place, group, scorers, results) for place in range(len(group.samples))]
        return Group(prompt=group.prompt, samples=samples)

    def stop_if_all_fail(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
        """Warn if scoring failed for every completion. Raises RewardError after MOST_FAILED_STEPS times in a row."""
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return
        errors = [next((e for e in s.extra.items() if e[0].startswith("error/")), None) for s in samples]
        self._failed_steps = self._failed_steps + 1 if all(errors) else 0
        if all(errors):
            name, message = errors[0]
            shown = f"No completion got a reward: all {len(samples)} failed, such as {name}: {message}"
            logger.warning(shown)
            if self._failed_steps == MOST_FAILED_STEPS:
                raise RewardError(f"{shown}, {MOST_FAILED_STEPS} times in a row: nothing is being learned. Correct it.")

    def _report(self, scorer: Reward | Judgement, result: RewardResult, group: Group[Completion]) -> None:
        """Add a call's metrics and report its failure. Raises RewardError if its policy is "raise"."""
        if result.log_error:
            self._warn_once(f"log of {scorer.name}", f"{result.log_error} Its logging is dropped for this group.")
        name, size, num_failed = scorer.name, len(group.samples), len(result.errors)
        self._metrics += call_metrics(
            name, result.metrics, num_completions=size, seconds=result.seconds, num_failed=num_failed
        )
        if not result.errors:
            return
        place, message = next(iter(result.errors.items()))
        if message.startswith("returned"):
            message += f" for completion {place} ({group.samples[place].text[:80]!r})"
        described = f"Reward function {name!r} failed on prompt {group.prompt.text[:80]!r}: {message}."
        if scorer.on_failure == "raise":
            raise RewardError(
                f"{described} Expected one finite float or None for each completion. Correct the function, or set "
                f"grader.on_failure_of to {{{name!r}: 'none'}} to go on without a reward for such completions."
            )
        counted = f"Such completions get no reward; the metric reward/{name}/failures counts them."
        self._warn_once(f"failure of {name}", f"{described} {counted}")

    def _scored(
        self, place: int, group: Group[Completion], scorers: Scorers, results: list[RewardResult]
    ) -> ScoredCompletion:
        breakdown: dict[str, float | None] = {}
        extra: dict[str, Any] = {}
        completion = group.samples[place]
        if completion.error is not None:
            extra["error/environment"] = completion.error
        for reward, result in zip(scorers.rewards, results):  # the judgement's result comes last and is not a reward
            breakdown[reward.name] = result.scores[place]
            extra |= {f"{reward.name}/{column}": values[place] for column, values in result.extras.items()}
            if place in result.errors:
                extra[f"error/{reward.name}"] = result.errors[place]
        failed = completion.error is not None or any(place in result.errors for result in results[:-1])
        answer, correct = results[-1].scores[place] or (None, None)
        turn_weight = sum(reward.weight for reward in scorers.rewards if reward.function is environment_reward)
        weighted = [r.weight * breakdown[r.name] for r in scorers.rewards if breakdown[r.name] is not None]
        return ScoredCompletion(
            completion=completion,
            reward=sum(weighted) if weighted and not failed else None,
            reward_breakdown=breakdown,
            extra=extra,
            answer=answer,
            correct=correct,
            turn_rewards=tuple(turn_weight * (turn.reward or 0.0) for turn in completion.turns),
        )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


class GradingRound:
    """Grades the groups that one replica samples together."""

    def __init__(self, grader: Grader, state: TrainerState) -> None:
        self._grader, self._state = grader, state
        self._begun: list[tuple[Group[Completion], list[RewardCall]]] = []

    def begin(self, group: Group[Completion]) -> None:
        """Start a group's calls in the workers, without waiting, while other groups are still being sampled."""
        self._begun.append((group, self._grader.calls(group, self._state)))

    def scores(self) -> list[Group[ScoredCompletion]]:
        """Wait for all calls. Returns the groups with their rewards, in the order of their prompts.

        A reward is the weighted sum of the functions' scores. A function that returns None for a completion is left out of
        its sum. A completion for which a function failed has no reward, because the sum of the others is not comparable.
        Raises RewardError if a function with policy "raise" fails, or if all have failed MOST_FAILED_STEPS times in a row.
        """
        begun = sorted(self._begun, key=lambda one: one[0].prompt.prompt_idx)
        with output_of(WHOSE):
            finish([call for _, calls in begun for call in calls])
        scored = [self._grader.combine(group, [call.result for call in calls]) for group, calls in begun]
        self._grader.stop_if_all_fail(scored)
        return scored
