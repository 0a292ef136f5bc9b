"""Reward functions and the task's judgement as scorers: how they are called, and how their output is checked."""

import asyncio
import copy
import inspect
import itertools
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_rl.data.task import OpenedText, RewardFunction, Task, completion_text
from torchtitan_rl.data.tool_calls import opened_thinking
from torchtitan_rl.data.turns import LARGEST_REWARD, environment_reward
from torchtitan_rl.events import recorded_by
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.rewards.reward_log import RewardLog
from torchtitan_rl.rewards.scorer import Groups, Scorer, ScorerResult
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.text import head_and_tail
from torchtitan_rl.types import Completion, Group, flat

ERROR_CHARACTERS = 2000
"""Maximum length of a stored exception text. Some exceptions quote their whole input."""

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
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    def result(self, groups: Groups, state: TrainerState | None, log: RewardLog) -> ScorerResult:
        output = self.function(**self._keywords(groups, state, log))
        if inspect.isawaitable(output):
            # asyncio.run takes only coroutines
            output = asyncio.run(asyncio.wait_for(output, None))
        return _checked(output, flat(groups))

    async def run_async(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Like `run`, for an async function, which is cancelled after `time_limit_seconds`."""
        log, began = RewardLog(self.name, len(flat(groups))), time.perf_counter()
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
                result = ScorerResult.failed(log.size, self.describe(error, groups))
        return self.completed(result, log, began)

    def describe(self, error: BaseException, groups: Groups) -> str:
        return _described(error) + _form_of_completions(error, groups)

    def _keywords(
        self, groups: Groups, state: TrainerState | None, log: RewardLog
    ) -> dict[str, Any]:
        """Returns the keywords that the function names, or all of them if it takes **kwargs. Values are fresh copies."""
        values = {
            "trainer_state": state or TrainerState(),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        columns = [name for group in groups for name in group.prompt.columns]
        lists = {
            name: lambda g, name=name: _copies(g.prompt.columns.get(name), g) for name in columns
        } | _LISTS
        if missing := self.missing(values | lists):
            raise TypeError(
                f"needs {missing}, which are neither keywords of the grader nor columns of the task"
            )
        named, takes_all = self._parameters()
        made = {
            name: [v for g in groups for v in make(g)]
            for name, make in lists.items()
            if takes_all or name in named
        }
        return made | {name: value for name, value in values.items() if takes_all or name in named}

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
                answer = _answer(self.task.extract_answer(completion_text(completion)))
                scores.append((answer, _verdict(self.task.judge(answer, group.prompt))))
        return ScorerResult(scores)

    def describe(self, error: BaseException, groups: Groups) -> str:
        return _described(error)


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
    shape = getattr(output, "shape", (size,))
    is_list = hasattr(output, "__len__") and not isinstance(
        output, (str, bytes, dict, set, frozenset)
    )
    if not is_list or shape == ():
        factory = "; a factory is named with (): f()" if callable(output) else ""
        raise TypeError(
            f"returned {type(output).__name__}, expected a list of {size} floats or None{factory}"
        )
    if len(shape) > 1:
        raise ValueError(
            f"returned shape {tuple(shape)} for {size} completions, expected ({size},)"
        )
    if len(output) != size:
        raise ValueError(f"returned {len(output)} values for {size} completions")
    return [None if value is None else _number(value) for value in output]


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"returned a value that is not a number: the text {value!r}")
    if np.iscomplexobj(value):  # numpy's would lose its imaginary part
        raise TypeError(f"returned a value that is not a number: {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned a value that is not a number: {error}") from error


def _answer(answer: Any) -> str | None:
    """Returns an extracted answer if it is a text or None. A number would never equal the expected text, so it raises."""
    if answer is None or isinstance(answer, str):
        return answer
    raise TypeError(
        f"extract_answer returned {type(answer).__name__} {answer!r:.80}, expected a text or None"
    )


def _verdict(verdict: Any) -> bool | None:
    """Returns a judgement if it is True, False or None, and raises TypeError otherwise."""
    if verdict is None or isinstance(verdict, bool | np.bool_):
        return None if verdict is None else bool(verdict)
    raise TypeError(
        f"judge returned {type(verdict).__name__} {verdict!r:.80}, expected True, False or None"
    )


def _described(error: BaseException) -> str:
    """Returns the exception and the line that raised it. Example: "KeyError: 'x' (my_rewards.py, line 7)" """
    where = users_line(error)
    if not where:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}, line {last.lineno})" if last.filename != __file__ else ""
    text = str(error)
    if isinstance(error, BdbQuit):
        text = "breakpoint() needs a terminal, and there is none"
    return f"{type(error).__name__}: {head_and_tail(text, ERROR_CHARACTERS)}{where}"


def _form_of_completions(error: BaseException, groups: Groups) -> str:
    """Returns how completions are given, after an error that a function makes which expects the other form; "" after others."""
    if not isinstance(error, AttributeError | TypeError):
        return ""
    if all(group.prompt.messages is None for group in groups):
        return "; completions are texts here, as the prompts have no messages"
    return "; completions are lists of messages here, and completion_text(completion) is their text"


def _copies(value: Any, group: Group[Completion]) -> list[Any]:
    return [copy.deepcopy(value) for _ in group.samples]


def _completions(group: Group[Completion]) -> list[str | list[dict[str, Any]]]:
    """Returns what the policy wrote, as texts or messages. `completion_text` knows where the prompt opened its thinking."""
    opened = opened_thinking(group.prompt.text)
    if group.prompt.messages is None:
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
    "prompts": lambda g: _copies(
        g.prompt.text if g.prompt.messages is None else g.prompt.messages, g
    ),
    "completions": lambda g: _completions(g),
    "completion_ids": lambda g: [c.token_ids.tolist() for c in g.samples],
    "logprobs": lambda g: [c.sampled_logprobs.tolist() for c in g.samples],
    "loss_masks": lambda g: [c.loss_mask.tolist() for c in g.samples],
    "finish_reasons": lambda g: [c.finish_reason for c in g.samples],
    "turn_rewards": lambda g: [[turn.reward for turn in c.turns] for c in g.samples],
    "turn_columns": lambda g: [
        [copy.deepcopy(turn.columns) for turn in c.turns] for c in g.samples
    ],
    "expected_answer": lambda g: [g.prompt.expected_answer] * len(g.samples),
}
"""Makers of lists with one entry for each completion. Every call gets new lists, because a function may change them."""
