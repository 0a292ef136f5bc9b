"""Reward functions and the task's judgement as scorers: how they are called, and how their output is checked."""

import asyncio
import copy
import inspect
import itertools
import pickle
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_rl.data.task import OpenedText, RewardFunction, Task, completion_text
from torchtitan_rl.data.tool_calls import opened_thinking
from torchtitan_rl.data.turns import LARGEST_REWARD, environment_reward
from torchtitan_rl.events import Listener, recorded_by
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.rewards.scorer import FailurePolicy, Groups, Scope, ScorerResult
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.text import head_and_tail, plain
from torchtitan_rl.types import Completion, Group, Metric, flat

ERROR_CHARACTERS = 2000
"""Maximum length of a stored exception text. Some exceptions quote their whole input."""

JUDGEMENT = "judgement"
"""Name of the task's own judgement among those of reward functions."""


class RewardLog(Listener):
    """Buffer for the values that one call of a reward function logs about `size` completions, or records.

    It never raises, because logging must not decide about training: after a wrong value it ignores what the call logs.
    """

    def __init__(self, function: str, size: int) -> None:
        self.extras: dict[str, list[Any]] = {}
        """{column: one value for each completion}"""
        self.metrics: list[tuple[str, float]] = []
        """(name, value), in the order of the calls"""
        self.recorded: list[tuple[str, Metric]] = []
        """(key, value) of `record_metric`, with values that can leave the process"""
        self.error = ""
        """What was wrong; "" if nothing was."""
        self.size = size
        self._function = function

    def record(self, key: str, value: Any, reduction: str, weight: float) -> None:
        """Keep a value for the rank's collector, which refuses those that are none."""
        self.recorded.append(
            (str(plain(key)), Metric(plain(value), plain(reduction), plain(weight)))
        )

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add `values`, for one completion after another, to a column of the sample tables.

        Calls extend the column, as in TRL; a call with a value for every completion sets it.
        """
        if self.error:
            return
        values = _as_list(values)
        if wrong := "no list" if values is None else _unpicklable(values):
            self._drop(f"log_extra({column!r}, ...) with {wrong}. Give a list of values.")
            return
        before = [] if len(values) == self.size else self.extras.get(str(column), [])
        self.extras[str(column)] = before + values

    def log_metric(self, name: str, value: float) -> None:
        """Average `value` into the step's metric `name`, over all calls and ranks."""
        if self.error:
            return
        try:
            self.metrics.append((str(name), float(value)))
        except (TypeError, ValueError):
            self._drop(f"log_metric({name!r}, {value!r}). Give a number.")

    def drop_incomplete(self) -> None:
        """Drop the columns without exactly one value for each completion. Call it at the end."""
        wrong = {
            column: len(values)
            for column, values in self.extras.items()
            if len(values) != self.size
        }
        for column in wrong:
            del self.extras[column]
        self.error = self.error or " ".join(
            f"Reward function {self._function!r} called log_extra({column!r}, ...) with {number} values for {self.size} "
            "completions. Give one value for each completion, None where there is none."
            for column, number in wrong.items()
        )

    def _drop(self, call: str) -> None:
        """Drop all that this call of the function logs, because half of it would mislead."""
        self.extras.clear()
        self.metrics.clear()
        self.error = f"Reward function {self._function!r} called {call}"


def _as_list(values: Any) -> list[Any] | None:
    """Returns `values` as a list, with tensors and arrays as Python numbers; None if they are not a sequence."""
    if isinstance(values, (str, bytes, dict)):
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if hasattr(values, "__iter__") else None


def _unpicklable(values: list[Any]) -> str:
    """Returns the reason why the values cannot be sent from a worker process; "" if they can."""
    try:
        pickle.dumps(values)
    except Exception as error:
        return f"values that cannot be pickled ({error})"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reward:
    """A reward function with its weight and its settings."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    scope: Scope = "group"

    @property
    def of_turns(self) -> bool:
        """Whether this is `environment_reward`."""
        return self.function is environment_reward

    @property
    def is_async(self) -> bool:
        """Whether the function is declared `async def`. Calls of such functions wait together."""
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    def run(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Score the groups in one call without a time limit. An exception becomes a result with errors."""
        log, begin = RewardLog(self.name, len(flat(groups))), time.perf_counter()
        try:
            with recorded_by(log):
                output = self.function(**self._keywords(groups, state, log))
                if inspect.isawaitable(output):
                    output = asyncio.run(
                        asyncio.wait_for(output, None)
                    )  # asyncio.run takes only coroutines
            result = _checked(output, log.size)
        except (
            BaseException
        ) as error:  # also SystemExit, which would look like the end of a finished run
            result = ScorerResult.failed(
                log.size, _described(error) + _form_of_completions(error, groups)
            )
        return _completed(result, log, begin)

    async def run_async(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Like `run`, for an async function, which is cancelled after `time_limit_seconds`."""
        log, begin = RewardLog(self.name, len(flat(groups))), time.perf_counter()
        limit = asyncio.timeout(self.time_limit_seconds or None)
        try:
            async with limit:
                with recorded_by(log, in_task=True):
                    output = await self.function(**self._keywords(groups, state, log))
            result = _checked(output, log.size)
        except BaseException as error:
            late = (
                isinstance(error, TimeoutError) and limit.expired()
            )  # otherwise it is the function's own
            shown = (
                TimeoutError(f"took longer than {self.time_limit_seconds:g} s") if late else error
            )
            result = ScorerResult.failed(
                log.size, _described(shown) + _form_of_completions(error, groups)
            )
        return _completed(result, log, begin)

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

    def missing(self, given: Collection[str]) -> list[str]:
        """Returns the required keywords that are not among `given`."""
        named, _ = self._parameters()
        return [name for name, p in named.items() if p.default is p.empty and name not in given]

    def _parameters(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """Returns the function's named parameters, and whether it also takes **kwargs."""
        parameters = inspect.signature(self.function).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """The task's own judgement, called like a reward function. A score is (answer, correct)."""

    task: Task
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    name: str = JUDGEMENT
    weight: float = 0.0
    is_async: bool = False
    scope: Scope = "group"

    def run(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Judge the groups. An exception becomes a result with errors, as in `Reward.run`."""
        log, begin = RewardLog(self.name, len(flat(groups))), time.perf_counter()
        try:
            asked = [
                (group.prompt, completion_text(one))
                for group in groups
                for one in _completions(group)
            ]
            with recorded_by(log):
                answers = [_answer(self.task.extract_answer(text)) for _, text in asked]
                verdicts = [
                    _verdict(self.task.judge(a, prompt)) for a, (prompt, _) in zip(answers, asked)
                ]
            result = ScorerResult(list(zip(answers, verdicts)))
        except BaseException as error:
            result = ScorerResult.failed(log.size, _described(error))
        return _completed(result, log, begin)


def _checked(output: Any, size: int) -> ScorerResult:
    """The result of a call that returned `output`. Values beyond LARGEST_REWARD, NaN and infinity are errors."""
    scores = as_scores(output, size)
    errors = {
        i: f"returned {s}"
        for i, s in enumerate(scores)
        if s is not None and not abs(s) <= LARGEST_REWARD
    }
    return ScorerResult([None if i in errors else score for i, score in enumerate(scores)], errors)


def _completed(result: ScorerResult, log: RewardLog, begin: float) -> ScorerResult:
    """The result with what its call has logged, and its seconds since `begin`."""
    log.drop_incomplete()
    result.extras, result.metrics, result.log_error = log.extras, log.metrics, log.error
    result.recorded = log.recorded
    result.seconds = time.perf_counter() - begin
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


def _answer(given: Any) -> str | None:
    """Returns an extracted answer if it is a text or None. A number would never equal the expected text, so it raises."""
    if given is None or isinstance(given, str):
        return given
    raise TypeError(
        f"extract_answer returned {type(given).__name__} {given!r:.80}, expected a text or None"
    )


def _verdict(given: Any) -> bool | None:
    """Returns a judgement if it is True, False or None, and raises TypeError otherwise."""
    if given is None or isinstance(given, bool | np.bool_):
        return None if given is None else bool(given)
    raise TypeError(
        f"judge returned {type(given).__name__} {given!r:.80}, expected True, False or None"
    )


def _described(error: BaseException) -> str:
    """Returns the exception and the line that raised it. Example: "KeyError: 'x' (my_rewards.py, line 7)" """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__]
    where = users_line(error) or (
        f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    )
    said = (
        "breakpoint() needs a terminal, and there is none"
        if isinstance(error, BdbQuit)
        else str(error)
    )
    return f"{type(error).__name__}: {head_and_tail(said, ERROR_CHARACTERS)}{where}"


def _form_of_completions(error: BaseException, groups: Groups) -> str:
    """Returns how completions are given, after an error that a function makes which expects the other form; "" after others."""
    said = str(error)
    if all(group.prompt.messages is None for group in groups):
        wrong = isinstance(error, TypeError) and said.startswith("string indices must be integers")
        return "; completions are texts here, as the prompts have no messages" if wrong else ""
    wrong = isinstance(error, AttributeError | TypeError) and (
        "'list' object" in said or "got 'list'" in said
    )
    return (
        "; completions are lists of messages here, and completion_text(completion) is their text"
        if wrong
        else ""
    )


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
