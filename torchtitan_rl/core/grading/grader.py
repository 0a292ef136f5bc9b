"""Grader: groups of completions in, the same completions with their rewards out."""

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
from torchtitan_rl.core.grading.reward_log import RewardMetrics
from torchtitan_rl.core.types import Completion, Group, Metric, Prompt, ScoredCompletion

logger = logging.getLogger(__name__)

WHOSE = "reward functions"
"""Whose output is bounded together, printed in this process or in workers."""

MOST_FAILED_STEPS = 3
"""Times in a row that all scores may fail with on_failure "none" before the run stops."""


@dataclass(frozen=True, slots=True)
class Scorers:
    """What scores the completions of one task: its reward functions, those of the config, and its judgement."""

    rewards: list[Reward]
    judgement: Judgement

    @property
    def all(self) -> list[Reward | Judgement]:
        return [*self.rewards, self.judgement]

    @property
    def turn_weight(self) -> float:
        """Weight of what an environment gave for each turn."""
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

        workers: int = number(1, least=1, most=1024)
        """Processes, on each generator replica, in which reward functions and the task's judgement run while other groups are
        still sampled. A call that takes too long is killed. Async functions need no worker: they wait together."""

        in_process: list[str] = field(default_factory=list)
        """Reward functions, by name, that run in the training process after sampling, because they hold a model on the GPU or
        share memory with the run. "judgement" names the task's. They have no time limit: the watchdog names one that hangs."""

    def __init__(self, config: Config, *, scorers: dict[str, Scorers], start_workers: StartWorkers) -> None:
        """
        Args:
            scorers: for each of the task's members, by name. `setup.build_grader` makes them of the config and the task.
            start_workers: called once, with what workers run. They know all that this process knows by then.
        """
        self._scorers = scorers
        self.reward_names = list(dict.fromkeys(r.name for one in scorers.values() for r in one.rewards))
        self._in_process = set(config.in_process)
        functions = {(name, i): scorer.run for name, one in scorers.items() for i, scorer in enumerate(one.all)}
        self._places = {key: place for place, key in enumerate(functions)}
        self._workers = start_workers(list(functions.values()), config.workers, whose=WHOSE)
        self._metrics = RewardMetrics()
        self._warned: set[str] = set()
        self._failed_steps = 0

    def round(self, state: TrainerState | None = None) -> "GradingRound":
        """The grading of the groups that are sampled together, which may begin before the last group ends."""
        return GradingRound(self, state or TrainerState())

    def score(
        self, groups: Sequence[Group[Completion]], *, state: TrainerState | None = None
    ) -> list[Group[ScoredCompletion]]:
        """The same groups, in order, with their rewards: a round that has ended already. Raises as `GradingRound.scores`."""
        round = self.round(state)
        for group in groups:
            round.begin(group)
        return round.scores()

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    def drain_metrics(self) -> dict[str, Metric]:
        """What this rank's reward functions logged since the last call, and how many scores failed."""
        return self._metrics.drain()

    def calls(self, group: Group[Completion], state: TrainerState) -> list[RewardCall]:
        """The calls that score a group: its task's rewards, in order, and the judgement. Those for workers have begun."""
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
        """The group with its rewards, from the results of its calls. Raises RewardError where a failure's policy says so."""
        scorers = self._scorers[group.prompt.task]
        for scorer, result in zip(scorers.all, results):
            self._report(scorer, result, group)
        samples = [self._scored(place, group, scorers, results) for place in range(len(group.samples))]
        return Group(prompt=group.prompt, samples=samples)

    def stop_if_all_fail(self, groups: Sequence[Group[ScoredCompletion]]) -> None:
        """Warn if no completion has a reward because functions fail. Raises RewardError after several times in a row."""
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
        """Count what a call logged and took, and say what failed. Raises RewardError where its policy says so."""
        if result.log_error:
            self._warn_once(f"log of {scorer.name}", f"{result.log_error} Its logging is dropped for this group.")
        self._metrics.add_logged(scorer.name, result.metrics, len(group.samples))
        self._metrics.add_call(scorer.name, result.seconds, len(result.errors))
        if result.errors:
            place, message = next(iter(result.errors.items()))
            if message.startswith("returned"):
                message += f" for completion {place} ({group.samples[place].text[:80]!r})"
            self._on_failure(scorer, message, group.prompt)

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

    def _scored(
        self, place: int, group: Group[Completion], scorers: Scorers, results: list[RewardResult]
    ) -> ScoredCompletion:
        breakdown: dict[str, float | None] = {}
        extra: dict[str, Any] = {}
        completion = group.samples[place]
        if completion.error is not None:
            extra["error/environment"] = completion.error
        for reward, result in zip(scorers.rewards, results):  # the judgement's result is left over
            breakdown[reward.name] = result.scores[place]
            extra |= {f"{reward.name}/{column}": values[place] for column, values in result.extras.items()}
            if place in result.errors:
                extra[f"error/{reward.name}"] = result.errors[place]
        failed = completion.error is not None or any(place in result.errors for result in results[:-1])
        answer, correct = results[-1].scores[place] or (None, None)
        weighted = [r.weight * breakdown[r.name] for r in scorers.rewards if breakdown[r.name] is not None]
        return ScoredCompletion(
            completion=completion,
            reward=sum(weighted) if weighted and not failed else None,
            reward_breakdown=breakdown,
            extra=extra,
            answer=answer,
            correct=correct,
            turn_rewards=tuple(scorers.turn_weight * (turn.reward or 0.0) for turn in completion.turns),
        )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


class GradingRound:
    """The grading of the groups that one replica samples together. Each begun call is kept with its group."""

    def __init__(self, grader: Grader, state: TrainerState) -> None:
        self._grader, self._state = grader, state
        self._begun: list[tuple[Group[Completion], list[RewardCall]]] = []

    def begin(self, group: Group[Completion]) -> None:
        """Hand a group's calls to the workers and return, while other groups are still sampled."""
        self._begun.append((group, self._grader.calls(group, self._state)))

    def scores(self) -> list[Group[ScoredCompletion]]:
        """Wait for the calls. Returns the begun groups with the completions' rewards, in the order of their prompts.

        A reward is the weighted sum over the functions that gave one: None from a function leaves that function out; a
        failed function leaves the completion without a reward, as the rest's sum does not compare with its siblings'.
        Raises RewardError when a function fails whose policy is "raise", or all have failed several times in a row.
        """
        begun = sorted(self._begun, key=lambda one: one[0].prompt.prompt_idx)
        with output_of(WHOSE):
            finish([call for _, calls in begun for call in calls])
        scored = [self._grader.combine(group, [call.result for call in calls]) for group, calls in begun]
        self._grader.stop_if_all_fail(scored)
        return scored
