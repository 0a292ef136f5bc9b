"""Reward functions and the task's judgement as scorers: how they are called, and how their output is checked."""

import asyncio
import copy
import inspect
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from torchtitan_rl.data.task import OpenedText, RewardFunction, Task
from torchtitan_rl.data.tool_calls import opened_thinking
from torchtitan_rl.data.turns import environment_reward
from torchtitan_rl.events import recorded_by
from torchtitan_rl.rewards.reward_log import RewardLog
from torchtitan_rl.rewards.scorer import Groups, Scorer, ScorerResult, described
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.types import LARGEST_REWARD, Completion, Group, Prompt, flat

JUDGEMENT = "judgement"
"""Name of the task's own judgement among those of reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reward(Scorer):
    """A reward function with its weight and its settings."""

    function: RewardFunction

    @property
    def of_turns(self) -> bool:
        """Whether its score is the sum of the turns' rewards from the environment."""
        return self.function is environment_reward

    @property
    def is_async(self) -> bool:
        """Whether the function is declared `async def`."""
        calls = (self.function, type(self.function).__call__)
        return any(map(inspect.iscoroutinefunction, calls))

    def result(self, groups: Groups, state: TrainerState | None, log: RewardLog) -> ScorerResult:
        output = self.function(**self._keywords(groups, state, log))
        if inspect.isawaitable(output):
            # asyncio.run takes only coroutines
            output = asyncio.run(asyncio.wait_for(output, None))
        return _checked(output, flat(groups))

    async def run_async(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Like `run`, for an async function, which is cancelled after `time_limit_seconds`."""
        log, began = RewardLog(len(flat(groups))), time.perf_counter()
        limit = asyncio.timeout(self.time_limit_seconds or None)
        try:
            async with limit:
                with recorded_by(log, in_task=True):
                    output = await self.function(**self._keywords(groups, state, log))
            result = _checked(output, flat(groups))
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                result = self.timed_out(log.size)
            else:  # also a TimeoutError of the function's own
                result = ScorerResult.failed(log.size, described(error))
        return self.completed(result, log, began)

    def _keywords(
        self, groups: Groups, state: TrainerState | None, log: RewardLog
    ) -> dict[str, Any]:
        """Returns the keywords that the function names, or all of them if it takes **kwargs. Values are fresh copies."""
        named, takes_all = self._parameters()
        columns = (name for group in groups for name in group.prompt.columns)
        lists = {name: partial(_copies, name) for name in columns} | _LISTS
        values = {
            "trainer_state": state or TrainerState(),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        for name, make in lists.items():
            if takes_all or name in named:
                values.setdefault(name, [value for group in groups for value in make(group)])
        return {name: value for name, value in values.items() if takes_all or name in named}

    def missing(self, keywords: Collection[str]) -> list[str]:
        """Returns the required keywords that are not among `keywords`."""
        named, _ = self._parameters()
        return [name for name, p in named.items() if p.default is p.empty and name not in keywords]

    def _parameters(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """Returns the function's named parameters, and whether it also takes **kwargs."""
        parameters = inspect.signature(self.function).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement(Scorer):
    """The task's own judgement, called like a reward function. A score is (answer, correct)."""

    task: Task
    name: str = JUDGEMENT
    weight: float = 0.0

    def result(self, groups: Groups, state: TrainerState | None, log: RewardLog) -> ScorerResult:
        scores = []
        for group in groups:
            for completion in _completions(group):
                answer = self.task.answer(completion)
                if not isinstance(answer, str | None):  # a number never equals the expected text
                    shown = f"{answer!r:.80}"
                    raise TypeError(f"extract_answer returned {shown}, expected a text or None")
                verdict = self.task.judge(answer, group.prompt)
                # As a bool, "no" would be right.
                if not isinstance(verdict, bool | np.bool_ | None):
                    raise TypeError(f"judge returned {verdict!r:.80}, expected True, False or None")
                shown = answer and self.task.shown_answer(answer, group.prompt)
                scores.append((shown, None if verdict is None else bool(verdict)))
        return ScorerResult(scores)


def _checked(output: Any, completions: list[Completion]) -> ScorerResult:
    """The result of a call that returned `output`. Values beyond LARGEST_REWARD, NaN and infinity are errors."""
    result = ScorerResult(as_scores(output, len(completions)))
    for i, (score, completion) in enumerate(zip(result.scores, completions, strict=True)):
        if score is not None and not abs(score) <= LARGEST_REWARD:
            result.scores[i] = None
            shown = f"completion {completion.sample_idx} ({completion.text[:80]!r})"
            result.errors[i] = f"returned {score} for {shown}"
    return result


def as_scores(output: Any, size: int) -> list[float | None]:
    """Returns a reward function's output as one float or None for each completion. NaN and infinity are kept.

    Raises ValueError for a wrong number of values and TypeError for values that are not numbers.
    """
    try:
        # The digits of "10", keys, and numbers in any order.
        if isinstance(output, str | dict | set):
            raise TypeError(f"it is a {type(output).__name__}")
        scores = [None if value is None else float(value) for value in output]
    except (TypeError, ValueError) as error:
        expected = f"expected a list of {size} numbers or None"
        raise TypeError(f"returned {output!r:.80}, {expected}: {error}") from error
    if len(scores) != size:
        raise ValueError(f"returned {len(scores)} values for {size} completions")
    return scores


def _copies(column: str, group: Group[Completion]) -> list[Any]:
    return [copy.deepcopy(group.prompt.columns.get(column)) for _ in group.samples]


def _asked(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Returns the prompt as reward functions get it. Its form is that of the completions."""
    return prompt.question or prompt.messages or prompt.text


def _completions(group: Group[Completion]) -> list[str | list[dict[str, Any]]]:
    """Returns what the policy wrote, as texts or messages. `completion_text` knows where the prompt opened its thinking."""
    opened = opened_thinking(group.prompt.text)
    if isinstance(_asked(group.prompt), str):
        return [_opened(completion.text, opened) for completion in group.samples]
    conversations = [copy.deepcopy(completion.messages) for completion in group.samples]
    for message in itertools.chain(*conversations):
        if message["role"] == "assistant":
            message["content"] = _opened(message["content"], opened)
    return conversations


def _opened(text: str, opened: str) -> str:
    marked = OpenedText(text)
    marked.opened = opened
    return marked if opened else text


_LISTS: dict[str, Callable[[Group[Completion]], list[Any]]] = {
    "prompts": lambda g: [copy.deepcopy(_asked(c.prompt or g.prompt)) for c in g.samples],
    "completions": _completions,
    "completion_ids": lambda g: [c.token_ids.tolist() for c in g.samples],
    "logprobs": lambda g: [c.sampled_logprobs.tolist() for c in g.samples],
    "loss_masks": lambda g: [c.loss_mask.tolist() for c in g.samples],
    "finish_reasons": lambda g: [c.finish_reason for c in g.samples],
    "turn_rewards": lambda g: [[turn.reward for turn in c.turns] for c in g.samples],
    "turn_columns": lambda g: [[copy.deepcopy(t.columns) for t in c.turns] for c in g.samples],
    "expected_answer": lambda g: [g.prompt.expected_answer] * len(g.samples),
}
"""Makers of lists with one entry for each completion. Every call gets new lists, because a function may change them."""
