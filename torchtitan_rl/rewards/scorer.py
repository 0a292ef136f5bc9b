"""What a reward function and the task's judgement have in common as scorers: their settings, and the result of a call."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.events import recorded_by
from torchtitan_rl.fields.references import users_line
from torchtitan_rl.rewards.reward_log import RewardLog
from torchtitan_rl.rewards.trainer_state import TrainerState
from torchtitan_rl.text import head_and_tail, plain
from torchtitan_rl.types import Completion, Group, flat

ERROR_CHARACTERS = 2000
"""Maximum length of a stored exception text. Some exceptions quote their whole input."""

FailurePolicy = Literal["raise", "none"]
Scope = Literal["group", "batch"]
Groups = Sequence[Group[Completion]]


class RewardError(TrainingStopped):
    """A reward function raised, took too long, or did not return scores."""


@dataclass(slots=True)
class ScorerResult:
    """Result of one call."""

    scores: list[Any]
    """One score for each completion, None if the scorer gave none: a float, or (answer, correct) from the judgement."""
    errors: dict[int, str] = field(default_factory=dict)
    """{index of the completion: error message}"""
    cause: Literal["function", "time limit", "killed"] = "function"
    """What the errors are due to; "killed": the worker was, from outside."""
    log: RewardLog = field(default_factory=RewardLog)
    """What the call logged and recorded, also if it failed afterwards."""
    seconds: float = 0.0

    @classmethod
    def failed(cls, size: int, message: str, **fields: Any) -> "ScorerResult":
        """Returns a result without a score for any of `size` completions."""
        return cls([None] * size, dict.fromkeys(range(size), message), **fields)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scorer(ABC):
    """Scores groups of completions, for the grader. It is hashable, and workers can call its `run`."""

    name: str
    weight: float = 1.0
    """Factor of its scores in the reward; 0 for the judgement."""
    on_failure: FailurePolicy = "raise"
    time_limit_seconds: float = 0.0
    """Time limit for one call; 0 means no limit."""
    scope: Scope = "group"
    """One call scores one prompt's group, or the batch: all completions that the replica samples together."""
    is_async: ClassVar[bool] = False
    """Whether `run_async` is called instead of `run`. Such calls wait together."""

    def run(self, groups: Groups, state: TrainerState | None) -> ScorerResult:
        """Score the groups in one call without a time limit. An exception becomes a result with errors."""
        log, began = RewardLog(len(flat(groups))), time.perf_counter()
        try:
            with recorded_by(log):
                result = self.result(groups, state, log)
        except BaseException as error:  # also SystemExit, which would look like a run's end
            result = ScorerResult.failed(log.size, described(error))
        return self.completed(result, log, began)

    def timed_out(self, size: int, more: str = "") -> ScorerResult:
        """The result of a call that took longer than the time limit."""
        seconds = self.time_limit_seconds
        message = f"TimeoutError: took longer than {seconds:g} s{more}"
        return ScorerResult.failed(size, message, cause="time limit", seconds=seconds)

    @abstractmethod
    def result(self, groups: Groups, state: TrainerState | None, log: RewardLog) -> ScorerResult:
        """Make the call. Raises what the foreign code raises."""

    @staticmethod
    def completed(result: ScorerResult, log: RewardLog, began: float) -> ScorerResult:
        """The result with what its call has logged, and its seconds since `began`."""
        log.drop_incomplete()
        result.log = log
        result.seconds = time.perf_counter() - began
        return result


def described(error: BaseException) -> str:
    """Returns the exception and the line that raised it. Example: "KeyError: 'x' (my_rewards.py, line 7)" """
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = users_line(error) or f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {head_and_tail(plain(error), ERROR_CHARACTERS)}{where}"
