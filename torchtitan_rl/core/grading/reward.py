"""One reward function: how it is found, called and held to what it promises."""

import ast
import asyncio
import copy
import inspect
import math
import re
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from torchtitan_rl.core.errors import TrainingStopped, UserError, expect
from torchtitan_rl.core.grading.reward_log import LogError, RewardLog
from torchtitan_rl.core.grading.time_limit import Expired, call_with_time_limit
from torchtitan_rl.core.services import RESERVED_COLUMNS, AnswerJudge, RewardFunction
from torchtitan_rl.core.text import head_and_tail
from torchtitan_rl.core.types import Completion, Group
from torchtitan_rl.library.references import load_function

T = TypeVar("T")

FailurePolicy = Literal["raise", "none"]

FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""What a function may raise that counts as its failure: an exit must not look like the end of a finished run, and a Ctrl-C of
the user's is a signal that the run has taken for itself."""

_REFERENCE = re.compile(r"(?:(?P<name>\w+)=)?(?P<place>[^:]+:(?P<function>\w+))(?:\((?P<arguments>.*)\))?", re.DOTALL)

ERROR_CHARACTERS = 2000
"""Of what a function raises: some quote all that they were given."""


class RewardError(TrainingStopped):
    """A reward function raised, took too long, or returned what is no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What reward functions get as `trainer_state`, under TRL's names."""

    global_step: int = 0
    """The step that the completions were sampled in; 0 before the first."""
    max_steps: int = 0
    """Steps of the whole run."""


@dataclass(slots=True)
class Outcome:
    """What one reward function made of one group."""

    scores: list[Any]
    """One a completion: None where it gave none."""
    errors: dict[int, str] = field(default_factory=dict)
    """{place in the group: what went wrong}"""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    log_error: str = ""
    """Why what it logged was dropped."""
    seconds: float = 0.0

    @classmethod
    def failed(cls, size: int, message: str) -> "Outcome":
        """No score for any of `size` completions."""
        return cls([None] * size, dict.fromkeys(range(size), message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its weight and its rules."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    """Of one call, for one prompt's group; 0 for none."""

    @property
    def is_async(self) -> bool:
        """Whether it is declared so; calls of such functions wait for their answers together."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def check_keywords(self, columns: Iterable[str]) -> None:
        """Raise UserError for a keyword that it needs and neither the grader nor these columns of the task give."""
        given = RESERVED_COLUMNS | set(columns)
        named, _ = self._parameters()
        missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
        expect(
            not missing, f"reward function {self.name}", missing,
            f"keywords that it can be given, which are {sorted(given)}", "Name a column of the task, or give a default.",
        )  # fmt: skip

    def run(self, group: Group[Completion], state: TrainerState, limited: bool = True) -> Outcome:
        """Its scores of one group; what it raises, too, is an outcome.

        Args:
            limited: end it after `time_limit_seconds`; not in a worker, which is killed instead.
        """
        return _value(self._outcome(group, state, self._call_limited if limited else self._call))

    async def run_async(self, group: Group[Completion], state: TrainerState) -> Outcome:
        """`run` of an async function: others go on while it waits."""
        return await self._outcome(group, state, self._await_limited)

    async def _outcome(self, group: Group[Completion], state: TrainerState, call: Callable) -> Outcome:
        size, begin = len(group.samples), time.perf_counter()
        log, log_error = RewardLog(self.name, size), ""
        try:
            try:
                output = await call(self._keywords(group, state, log))
            except LogError as error:
                # What is logged must not decide about training: score once more, with logging switched off.
                log, log_error = RewardLog(self.name, size), str(error)
                output = await call(self._keywords(group, state, None))
            scores = as_scores(output, size)
        except FAILURES as error:
            outcome = Outcome.failed(size, described(error))
        else:
            errors = {i: f"returned {score}" for i, score in enumerate(scores) if is_failed(score)}
            outcome = Outcome([None if i in errors else score for i, score in enumerate(scores)], errors)
        outcome.extras, outcome.metrics, outcome.log_error = log.extras, log.metrics, log_error
        outcome.seconds = time.perf_counter() - begin
        return outcome

    async def _call(self, keywords: dict[str, Any]) -> Any:
        output = self.function(**keywords)
        return asyncio.run(_awaited(output)) if inspect.isawaitable(output) else output

    async def _call_limited(self, keywords: dict[str, Any]) -> Any:
        return call_with_time_limit(lambda: _value(self._call(keywords)), self.time_limit_seconds)

    async def _await_limited(self, keywords: dict[str, Any]) -> Any:
        seconds = self.time_limit_seconds
        try:
            async with asyncio.timeout(seconds or None) as limit:
                return await self.function(**keywords)
        except (TimeoutError, Expired):
            if seconds and limit.when() <= asyncio.get_running_loop().time():
                raise TimeoutError(f"took longer than {seconds:g} s") from None
            raise

    def _keywords(self, group: Group[Completion], state: TrainerState, log: RewardLog | None) -> dict[str, Any]:
        """Of all that it may know, what it names, or everything where it takes **kwargs; its own copies."""
        given = {name: partial(_column, value) for name, value in group.prompt.columns.items()} | _LISTS
        given |= {
            "trainer_state": lambda _: state,
            "log_extra": lambda _: log.log_extra if log else _ignore,
            "log_metric": lambda _: log.log_metric if log else _ignore,
        }
        named, takes_all = self._parameters()
        if missing := [name for name, p in named.items() if p.default is p.empty and name not in given]:
            raise TypeError(f"needs {missing}, which the grader does not give and no column of the task is called")
        return {name: make(group) for name, make in given.items() if takes_all or name in named}

    def _parameters(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """Those that have a name of their own, and whether it takes **kwargs besides."""
        parameters = inspect.signature(self.function).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The task's own view of a group, under the same rules as a reward function: (answer, correct) a completion."""

    task: AnswerJudge
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    name: str = "judgement"
    is_async: bool = False

    def run(self, group: Group[Completion], state: TrainerState, limited: bool = True) -> Outcome:
        """As `Reward.run`."""

        def judge() -> list[tuple[str | None, bool | None]]:
            answers = [_answer(self.task.extract_answer(completion.text)) for completion in group.samples]
            return [(answer, self.task.judge(answer, group.prompt)) for answer in answers]

        begin = time.perf_counter()
        try:
            outcome = Outcome(call_with_time_limit(judge, self.time_limit_seconds if limited else 0))
        except FAILURES as error:
            outcome = Outcome.failed(len(group.samples), described(error))
        outcome.seconds = time.perf_counter() - begin
        return outcome


def load_reward(reference: str) -> tuple[str, RewardFunction]:
    """A reward function and the name it goes by: the one behind the colon, or one given in front.

    place:function, place:factory(keyword=value, ...), or name=either of them, with literal values.

    Raises:
        UserError: naming `grader.rewards`.
    """
    field_name = "grader.rewards"
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return reference, load_function(reference, field_name)  # which says what is wrong with it
    name, function = found["name"] or found["function"], load_function(found["place"], field_name)
    if found["arguments"] is None:
        expect(not inspect.isclass(function), field_name, reference, "a function or an object, not a class", "Add ().")
        return name, function
    try:
        call = ast.parse(f"f({found['arguments']})", mode="eval").body
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        return name, function(*map(ast.literal_eval, call.args), **keywords)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UserError(
            f"{field_name} = {reference!r}: expected a call with literal values that {found['function']} takes, but: {error}. "
            "Correct the arguments."
        ) from error


def as_scores(output: Any, group_size: int) -> list[float | None]:
    """A reward function's output as one float or None a completion; NaN and infinity stay as they are.

    Raises ValueError for a wrong number of values and TypeError for values that are no numbers.
    """
    shape = getattr(output, "shape", (group_size,))
    if (
        output is None
        or isinstance(output, (str, bytes, dict, set, frozenset))
        or not hasattr(output, "__len__")
        or shape == ()
    ):
        raise TypeError(f"returned {type(output).__name__}, expected a list of {group_size} floats or None")
    if len(shape) > 1:
        raise ValueError(f"returned shape {tuple(shape)} for {group_size} completions, expected ({group_size},)")
    if len(output) != group_size:
        raise ValueError(f"returned {len(output)} values for {group_size} completions")
    return [None if value is None else _number(value) for value in output]


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"returned a value that is no number: the text {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned a value that is no number: {error}") from error


def _answer(given: Any) -> str | None:
    """It is compared with a text, to which a number is never equal."""
    if given is None or isinstance(given, str):
        return given
    raise TypeError(f"extract_answer returned {type(given).__name__} {given!r:.80}, expected a text or None")


def is_failed(score: float | None) -> bool:
    """Whether a score is NaN or infinite. None is none of that: the function did not apply."""
    return score is not None and not math.isfinite(score)


def function_name(function: Callable) -> str:
    """The name of a task's reward function in configs and tables."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def described(error: BaseException) -> str:
    """What was raised, and on which line of whose file. Example: "KeyError: 'x' (my_rewards.py, line 7)" """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torchtitan_rl/core/grading/" not in frame.filename
    ]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {head_and_tail(str(error), ERROR_CHARACTERS)}{where}"


async def _awaited(output: Any) -> Any:
    return await output


def _value(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns in which nothing waits: no event loop runs, so what it calls may run one."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it has waited")


def _column(value: Any, group: Group[Completion]) -> list[Any]:
    return [copy.deepcopy(value) for _ in group.samples]


def _completions(group: Group[Completion]) -> list[Any]:
    chat = group.prompt.messages is not None
    return [copy.deepcopy(c.messages) if chat else c.text for c in group.samples]


_LISTS: dict[str, Callable[[Group[Completion]], list[Any]]] = {
    "prompts": lambda g: _column(g.prompt.text if g.prompt.messages is None else g.prompt.messages, g),
    "completions": _completions,
    "completion_ids": lambda g: [c.token_ids.tolist() for c in g.samples],
    "logprobs": lambda g: [c.sampled_logprobs.tolist() for c in g.samples],
    "loss_masks": lambda g: [c.loss_mask.tolist() for c in g.samples],
    "finish_reasons": lambda g: [c.finish_reason for c in g.samples],
    "turn_rewards": lambda g: [[turn.reward for turn in c.turns] for c in g.samples],
    "expected_answer": lambda g: [g.prompt.expected_answer] * len(g.samples),
}
"""Lists with one entry a completion, made anew for every call: a function may do with them what it likes."""


def _ignore(*_: Any) -> None:
    """In place of a callback."""
