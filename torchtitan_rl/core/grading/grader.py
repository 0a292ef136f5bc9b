"""Grader: groups of completions in, the same completions with their rewards out."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.events import output_of
from torchtitan_rl.core.generator.environment import environment_reward
from torchtitan_rl.core.grading.calls import WHOSE, Call, Calls
from torchtitan_rl.core.grading.reward import (
    FailurePolicy,
    Judgement,
    Outcome,
    Reward,
    RewardError,
    TrainerState,
    function_name,
    load_reward,
)
from torchtitan_rl.core.grading.reward_log import LogNames, MetricSums
from torchtitan_rl.core.services import RewardFunction
from torchtitan_rl.core.types import Completion, Group, Metric, Prompt, ScoredCompletion

if TYPE_CHECKING:
    from torchtitan_rl.library.task import Task

logger = logging.getLogger(__name__)


MOST_FAILED_STEPS = 3
"""Calls of `score` in a row without a single reward, all failed: then on_failure "none" does not help, and the run stops."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A task that examples come from, with what scores their completions."""

    rewards: list[Reward]
    judgement: Judgement

    @property
    def turn_weight(self) -> float:
        """Of what an environment gave for each turn."""
        return sum(reward.weight for reward in self.rewards if reward.function is environment_reward)


class Grader(Configurable):
    """Scores completions with the task's reward functions and those of the config, on the rank that generated them.

    Nothing here communicates: rewards and what reward functions log travel with the scored completions and with
    `drain_metrics`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        rewards: list[str] = field(default_factory=list)
        """Reward functions besides the task's own: path/to/file.py:function or package.module:function."""

        weights: dict[str, float] = number({}, above=-math.inf, below=math.inf, remedy="0 only watches a function.")
        """Weight of a reward function in the sum, by its name; 1 for those not named here."""

        on_failure: FailurePolicy = "raise"
        """When a reward function raises, takes too long or returns no score: raise, or none, which leaves these
        completions without a reward (they take no part in the baseline, get advantage 0, are counted and shown)."""

        on_failure_of: dict[str, FailurePolicy] = field(default_factory=dict)
        """The same for single reward functions, by name."""

        time_limit_seconds: float = number(60.0, least=0, remedy="Use 0 for no limit.")
        """Longest time of one call of a reward function, which scores one prompt's group; 0 for no limit."""

        time_limit_seconds_of: dict[str, float] = number({}, least=0, remedy="Use 0 for no limit.")
        """The same for single reward functions, by name."""

        workers: int = number(0, least=0, most=1024, remedy="0 grades in the training process.")
        """Processes, on each generator replica, in which reward functions and the task's judgement run, several groups at
        once and while others are still sampled; there a call that takes too long is killed, native code too. Async functions
        need none: they wait together. 0: in the training process, one after another, when all is sampled."""

        in_process: list[str] = field(default_factory=list)
        """Reward functions, by name, that stay in the training process in spite of `workers`: they hold a model on the GPU,
        or share memory with something there."""

    def __init__(self, config: Config, *, task: "Task") -> None:
        extra = [load_reward(reference) for reference in config.rewards]
        self._members = {name: _member(config, one, extra) for name, one in task.members().items()}
        self.reward_names = list(dict.fromkeys(r.name for member in self._members.values() for r in member.rewards))
        _check(config, self.reward_names)
        scorers = [s for member in self._members.values() for s in (*member.rewards, member.judgement)]
        self._calls = Calls(scorers, workers=config.workers, in_process=config.in_process)
        self._column_names = LogNames("column")
        self._metrics = MetricSums()
        self._warned: set[str] = set()
        self._failed_steps = 0

    def begin(self, group: Group[Completion], *, state: TrainerState | None = None) -> None:
        """Let the workers, where there are any, start on a group while others are still sampled; `score` collects it."""
        self._calls.begin(self._calls_about(group), state or TrainerState())

    def score(
        self, groups: Sequence[Group[Completion]], *, state: TrainerState | None = None
    ) -> list[Group[ScoredCompletion]]:
        """The same groups with the completions' rewards, in the same order.

        A reward is the weighted sum over the functions that gave one: None from a function leaves that function out; a
        failed function leaves the completion without a reward, as the rest's sum does not compare with its siblings'.
        Raises RewardError when a function fails whose policy is "raise", or all have failed several times in a row.
        """
        calls = [self._calls_about(group) for group in groups]
        with output_of(WHOSE):
            outcomes = iter(self._calls.run([call for about in calls for call in about], state or TrainerState()))
        scored = [
            self._scored(group, self._members[group.prompt.task], [next(outcomes) for _ in about])
            for group, about in zip(groups, calls, strict=True)
        ]
        self._stop_if_all_fail(scored)
        return scored

    def close(self) -> None:
        """End the worker processes."""
        self._calls.close()

    def drain_metrics(self) -> dict[str, Metric]:
        """What this rank's reward functions logged since the last call, and how many scores failed."""
        return self._metrics.drain()

    def _calls_about(self, group: Group[Completion]) -> list[Call]:
        """Of its task's rewards, in order, and of the judgement; none where there is nothing to score."""
        member = self._members[group.prompt.task]
        return [Call(scorer, group) for scorer in (*member.rewards, member.judgement)] if group.samples else []

    def _scored(self, group: Group[Completion], member: _Member, outcomes: list[Outcome]) -> Group[ScoredCompletion]:
        """Put a group's outcomes together: those of its member's rewards, in order, and of the judgement."""
        scorers = [*member.rewards, member.judgement]
        for scorer, outcome in zip(scorers, outcomes):
            self._report(scorer, outcome, group)
        return Group(
            prompt=group.prompt, samples=[self._combined(i, group, member, outcomes) for i in range(len(group.samples))]
        )

    def _report(self, scorer: Reward | Judgement, outcome: Outcome, group: Group[Completion]) -> None:
        """Count what a call logged and took; say what failed. Raises RewardError where its policy says so."""
        if outcome.log_error:
            self._warn_once(f"log of {scorer.name}", f"{outcome.log_error} Its logging is dropped for this group.")
        self._metrics.add(scorer.name, outcome.metrics)
        self._metrics.add_seconds(scorer.name, outcome.seconds)
        for column in outcome.extras:
            self._column_names.register(scorer.name, column)
        if outcome.errors:
            self._metrics.add_failures(scorer.name, len(outcome.errors))
            index, message = next(iter(outcome.errors.items()))
            one = (
                f" for completion {index} ({group.samples[index].text[:80]!r})"
                if message.startswith("returned")
                else ""
            )
            self._on_failure(scorer, message + one, group.prompt)

    def _on_failure(self, reward: Reward | Judgement, message: str, prompt: Prompt) -> None:
        described = f"Reward function {reward.name!r} failed on prompt {prompt.text[:80]!r}: {message}."
        if reward.on_failure == "raise":
            raise RewardError(
                f"{described} Expected one finite float or None for each completion. Correct the function, or set "
                f"grader.on_failure_of to {{{reward.name!r}: 'none'}} to go on without a reward for such completions."
            )
        self._warn_once(
            f"failure of {reward.name}",
            f"{described} Such completions get no reward; the metric reward/{reward.name}/failures counts them.",
        )

    def _combined(
        self, index: int, group: Group[Completion], member: _Member, outcomes: list[Outcome]
    ) -> ScoredCompletion:
        breakdown: dict[str, float | None] = {}
        extra: dict[str, Any] = {}
        completion = group.samples[index]
        failed = completion.error is not None
        if failed:
            extra["error/environment"] = completion.error
        for reward, outcome in zip(member.rewards, outcomes):  # the judgement's is left over
            breakdown[reward.name] = outcome.scores[index]
            for column, values in outcome.extras.items():
                extra[self._column_names.shown(reward.name, column)] = values[index]
            if index in outcome.errors:
                failed = True
                extra[f"error/{reward.name}"] = outcome.errors[index]
        answer, correct = outcomes[-1].scores[index] or (None, None)
        weighted = [r.weight * breakdown[r.name] for r in member.rewards if breakdown[r.name] is not None]
        return ScoredCompletion(
            completion=completion,
            reward=sum(weighted) if weighted and not failed else None,
            reward_breakdown=breakdown,
            extra=extra,
            answer=answer,
            correct=correct,
            turn_rewards=tuple(member.turn_weight * (turn.reward or 0.0) for turn in completion.turns),
        )

    def _stop_if_all_fail(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
        """Say, and in the end do not accept, that no completion at all has a reward because functions fail."""
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

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def _member(config: Grader.Config, task: "Task", extra: Sequence[tuple[str, RewardFunction]]) -> _Member:
    """The rewards and the judgement of one task. Raises UserError for none, two of one name or a keyword that nobody gives."""
    functions = [*((function_name(function), function) for function in task.reward_functions()), *extra]
    names = [name for name, _ in functions]
    expect(
        bool(names), "grader.rewards", config.rewards, "a reward function, as the task has none", "Name one or more."
    )
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(
        not twice, "grader.rewards", config.rewards,
        f"one reward function of each name, but with the task's own there are two called {twice}",
        "Give one another name: other_name=path/to/file.py:function.",
    )  # fmt: skip
    rewards = [
        Reward(
            name=name,
            function=function,
            weight=config.weights.get(name, 1.0),
            on_failure=config.on_failure_of.get(name, config.on_failure),
            time_limit_seconds=config.time_limit_seconds_of.get(name, config.time_limit_seconds),
        )
        for name, function in functions
    ]
    columns = task.train_example(0, seed=0).columns
    for reward in rewards:
        reward.check_keywords(columns)
    return _Member(
        rewards, Judgement(task=task, on_failure=config.on_failure, time_limit_seconds=config.time_limit_seconds)
    )


def _check(config: Grader.Config, names: list[str]) -> None:
    """Raise UserError for settings of a function that does not exist, and for impossible ones."""
    settings: dict[str, Collection[str]] = {
        "weights": config.weights,
        "on_failure_of": config.on_failure_of,
        "time_limit_seconds_of": config.time_limit_seconds_of,
        "in_process": config.in_process,
    }
    expect(
        0 <= config.workers <= 1024, "grader.workers", config.workers, "between 0 and 1024",
        "0 grades in the training process.",
    )  # fmt: skip
    for setting, by_name in settings.items():
        known = set(by_name) <= set(names)
        expect(known, f"grader.{setting}", by_name, f"names of reward functions among {names}", "Correct the name.")
    for name, weight in config.weights.items():
        expect(math.isfinite(weight), f"grader.weights {name}", weight, "a finite number", "0 only watches a function.")
    for name, seconds in {"": config.time_limit_seconds, **config.time_limit_seconds_of}.items():
        field = f"grader.time_limit_seconds_of {name}" if name else "grader.time_limit_seconds"
        expect(0 <= seconds < math.inf, field, seconds, "0 or more seconds", "Use 0 for no limit.")
