"""Grader: groups of completions in, the same completions with their rewards out."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.conversations import environment_reward
from torchtitan_rl.grading.reward import (
    FailurePolicy,
    Reward,
    RewardError,
    as_scores,
    function_name,
    is_failed,
)
from torchtitan_rl.grading.reward_log import LogError, LogNames, MetricSums, RewardLog
from torchtitan_rl.run.errors import expect
from torchtitan_rl.run.references import load_function
from torchtitan_rl.tasks import Task
from torchtitan_rl.types import Completion, Group, Metric, Prompt, ScoredCompletion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What reward functions get as `trainer_state`, under TRL's names."""

    global_step: int = 0
    """The step that the completions were sampled in; 0 before the first."""
    max_steps: int = 0
    """Steps of the whole run."""


class Grader(Configurable):
    """Scores completions with the task's reward functions and those of the config, on the rank that generated them.

    Nothing here communicates: rewards and what reward functions log travel with the scored completions and with
    `drain_metrics`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        rewards: list[str] = field(default_factory=list)
        """Reward functions besides the task's own: path/to/file.py:function or package.module:function."""

        weights: dict[str, float] = field(default_factory=dict)
        """Weight of a reward function in the sum, by its name; 1 for those not named here."""

        on_failure: FailurePolicy = "raise"
        """When a reward function raises, takes too long or returns no score: raise, or none, which leaves these
        completions without a reward (they take no part in the baseline, get advantage 0, are counted and shown)."""

        on_failure_of: dict[str, FailurePolicy] = field(default_factory=dict)
        """The same for single reward functions, by name."""

        time_limit_seconds: float = 60.0
        """Longest time of one call of a reward function, which scores one prompt's group; 0 for no limit."""

        time_limit_seconds_of: dict[str, float] = field(default_factory=dict)
        """The same for single reward functions, by name."""

    def __init__(self, config: Config, *, task: Task) -> None:
        functions = [*task.reward_functions(), *(load_function(r, "grader.rewards") for r in config.rewards)]
        names = [function_name(function) for function in functions]
        _check(config, names)
        self._task = task
        self._rewards = [
            Reward(
                name=name,
                function=function,
                weight=config.weights.get(name, 1.0),
                on_failure=config.on_failure_of.get(name, config.on_failure),
                time_limit_seconds=config.time_limit_seconds_of.get(name, config.time_limit_seconds),
            )
            for name, function in zip(names, functions, strict=True)
        ]
        self._turn_weight = sum(r.weight for r in self._rewards if r.function is environment_reward)
        self._column_names = LogNames("column")
        self._metrics = MetricSums()
        self._warned: set[str] = set()

    @property
    def reward_names(self) -> list[str]:
        """The names of the reward functions, in the order of every `reward_breakdown`."""
        return [reward.name for reward in self._rewards]

    def score(
        self, groups: Sequence[Group[Completion]], *, state: TrainerState = TrainerState()
    ) -> list[Group[ScoredCompletion]]:
        """The same groups with the completions' rewards, in the same order.

        A reward is the weighted sum over the functions that gave one: None from a function leaves that function out; a
        failed function leaves the completion without a reward, as the rest's sum does not compare with its siblings'.
        Raises RewardError when a function fails whose policy is "raise".
        """
        return [Group(prompt=g.prompt, samples=self._score(g, state) if g.samples else []) for g in groups]

    def drain_metrics(self) -> dict[str, Metric]:
        """What this rank's reward functions logged since the last call, and how many scores failed."""
        return self._metrics.drain()

    def _score(self, group: Group[Completion], state: TrainerState) -> list[ScoredCompletion]:
        keywords = _keywords(group, state)
        outcomes = [self._run(reward, group, keywords) for reward in self._rewards]
        for reward, outcome in zip(self._rewards, outcomes, strict=True):
            self._metrics.add(reward.name, outcome.log.metrics)
            if outcome.errors:
                self._metrics.add_failures(reward.name, len(outcome.errors))
            for column in outcome.log.extras:
                self._column_names.register(reward.name, column)
        return [self._combined(index, group, outcomes) for index in range(len(group.samples))]

    def _run(self, reward: Reward, group: Group[Completion], keywords: dict[str, Any]) -> "_Outcome":
        """One function's scores of one group. Raises RewardError where its policy says so."""
        size = len(group.samples)
        keywords = {k: list(v) if isinstance(v, list) else v for k, v in keywords.items()}  # its own, should it sort
        log = RewardLog(reward.name, size)
        try:
            try:
                output = reward.call({**keywords, "log_extra": log.log_extra, "log_metric": log.log_metric})
            except LogError as error:
                # What is logged must not decide about training: score once more, with logging switched off.
                self._warn_once(f"log of {reward.name}", f"{error} Its logging is dropped for this group.")
                log = RewardLog(reward.name, size)
                output = reward.call({**keywords, "log_extra": _ignore, "log_metric": _ignore})
            scores = as_scores(output, size)
        except (Exception, SystemExit) as error:  # an exit must not look like the end of a finished run
            message = f"{type(error).__name__}: {error}"
            self._on_failure(reward, message, group.prompt, error)
            return _Outcome([None] * size, dict.fromkeys(range(size), message), log)
        errors = {i: f"returned {score}" for i, score in enumerate(scores) if is_failed(score)}
        if errors:
            index, message = next(iter(errors.items()))
            shown = f"{message} for completion {index} ({group.samples[index].text[:80]!r})"
            self._on_failure(reward, shown, group.prompt, None)
        return _Outcome([None if i in errors else score for i, score in enumerate(scores)], errors, log)

    def _on_failure(self, reward: Reward, message: str, prompt: Prompt, cause: Exception | None) -> None:
        described = f"Reward function {reward.name!r} failed on prompt {prompt.text[:80]!r}: {message}."
        if reward.on_failure == "raise":
            raise RewardError(
                f"{described} Expected one finite float or None for each completion. Correct the function, or set "
                f"grader.on_failure_of to {{{reward.name!r}: 'none'}} to go on without a reward for such completions."
            ) from cause
        self._warn_once(
            f"failure of {reward.name}",
            f"{described} Such completions get no reward; the metric reward/{reward.name}/failures counts them.",
        )

    def _combined(self, index: int, group: Group[Completion], outcomes: list["_Outcome"]) -> ScoredCompletion:
        completion = group.samples[index]
        breakdown: dict[str, float | None] = {}
        extra: dict[str, Any] = {}
        failed = completion.error is not None
        if failed:
            extra["error/environment"] = completion.error
        for reward, outcome in zip(self._rewards, outcomes, strict=True):
            breakdown[reward.name] = outcome.scores[index]
            for column, values in outcome.log.extras.items():
                extra[self._column_names.shown(reward.name, column)] = values[index]
            if index in outcome.errors:
                failed = True
                extra[f"error/{reward.name}"] = outcome.errors[index]
        answer = self._task.extract_answer(completion.text)
        weighted = [r.weight * breakdown[r.name] for r in self._rewards if breakdown[r.name] is not None]
        return ScoredCompletion(
            completion=completion,
            reward=sum(weighted) if weighted and not failed else None,
            reward_breakdown=breakdown,
            extra=extra,
            answer=answer,
            correct=self._task.judge(answer, group.prompt),
            turn_rewards=tuple(self._turn_weight * (turn.reward or 0.0) for turn in completion.turns),
        )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one reward function made of one group."""

    scores: list[float | None]
    errors: dict[int, str]
    """{place in the group: what went wrong}"""
    log: RewardLog


def _keywords(group: Group[Completion], state: TrainerState) -> dict[str, Any]:
    """TRL's keywords without the callbacks: lists with one entry a completion; chat prompts in conversational form."""
    prompt, samples = group.prompt, group.samples
    chat = prompt.messages is not None
    n = len(samples)
    return {
        **{column: [value] * n for column, value in prompt.columns.items()},
        "prompts": [prompt.messages if chat else prompt.text] * n,
        "completions": [c.messages if chat else c.text for c in samples],
        "completion_ids": [c.token_ids.tolist() for c in samples],
        "logprobs": [c.sampled_logprobs.tolist() for c in samples],
        "loss_masks": [c.loss_mask.tolist() for c in samples],
        "finish_reasons": [c.finish_reason for c in samples],
        "turn_rewards": [[turn.reward for turn in c.turns] for c in samples],
        "expected_answer": [prompt.expected_answer] * n,
        "trainer_state": state,
    }


def _check(config: Grader.Config, names: list[str]) -> None:
    """Raise UserError for two functions of one name, settings of a function that does not exist, impossible settings."""
    expect(
        bool(names), "grader.rewards", config.rewards, "a reward function, as the task has none", "Name one or more."
    )
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(
        not twice,
        "grader.rewards",
        config.rewards,
        f"one reward function of each name, but with the task's own there are two called {twice}",
        "Rename one.",
    )
    settings: dict[str, Mapping[str, Any]] = {
        "weights": config.weights,
        "on_failure_of": config.on_failure_of,
        "time_limit_seconds_of": config.time_limit_seconds_of,
    }
    for setting, by_name in settings.items():
        known = by_name.keys() <= set(names)
        expect(known, f"grader.{setting}", by_name, f"names of reward functions among {names}", "Correct the name.")
    for name, weight in config.weights.items():
        expect(math.isfinite(weight), f"grader.weights {name}", weight, "a finite number", "0 only watches a function.")
    for name, seconds in {"": config.time_limit_seconds, **config.time_limit_seconds_of}.items():
        field = f"grader.time_limit_seconds_of {name}" if name else "grader.time_limit_seconds"
        expect(0 <= seconds < math.inf, field, seconds, "0 or more seconds", "Use 0 for no limit.")


def _ignore(*_: Any) -> None:
    """In place of a callback."""
