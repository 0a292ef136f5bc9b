"""One reward function: how it is found, called and held to what it promises."""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.grading.time_limit import call_with_time_limit
from torchtitan_rl.run.errors import TrainingStopped
from torchtitan_rl.tasks import RewardFunction

FailurePolicy = Literal["raise", "none"]


class RewardError(TrainingStopped):
    """A reward function raised, took too long, or returned what is no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its weight and its rules."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    """Of one call, for one prompt's group; 0 for none."""

    def call(self, keywords: dict[str, Any]) -> Any:
        """What the function returns for those of `keywords` that it names, or for all when it takes **kwargs.

        Raises TimeoutError, TypeError when it needs a keyword that is not there, and whatever the function raises.
        """
        parameters = inspect.signature(self.function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if missing := [p.name for p in named if p.default is p.empty and p.name not in keywords]:
            raise TypeError(f"needs {missing}, which the grader does not give and no column of the task is called")

        async def awaited(output: Awaitable[Any]) -> Any:
            return await output

        def call() -> Any:
            output = self.function(**keywords)
            return asyncio.run(awaited(output)) if inspect.isawaitable(output) else output

        return call_with_time_limit(call, self.time_limit_seconds)


def as_scores(output: Any, group_size: int) -> list[float | None]:
    """A reward function's output as one float or None a completion; NaN and infinity stay as they are.

    Raises ValueError for a wrong number of values and TypeError for values that are no numbers.
    """
    if output is None or isinstance(output, (str, bytes, dict)) or not hasattr(output, "__len__"):
        raise TypeError(f"returned {type(output).__name__}, expected a list of {group_size} floats or None")
    if len(output) != group_size:
        raise ValueError(f"returned {len(output)} values for {group_size} completions")
    try:
        return [None if value is None else float(value) for value in output]
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned a value that is no number: {error}") from error


def is_failed(score: float | None) -> bool:
    """Whether a score is NaN or infinite. None is none of that: the function did not apply."""
    return score is not None and not math.isfinite(score)


def function_name(function: Callable) -> str:
    """The name a reward function has in configs and tables."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
