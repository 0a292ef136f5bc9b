"""What the grader asks of a scorer: a reward function, or the task's judgement. `rewards/reward.py` calls them as TRL
does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.types import Completion, Group, Metric

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
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """{column logged by the function: one value for each completion}"""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """(name, value) logged by the function"""
    recorded: list[tuple[str, Metric]] = field(default_factory=list)
    """(key, value) that the call gave to `record_metric`, also if it failed afterwards"""
    log_error: str = ""
    """Reason why the call's logging was dropped; "" if it was kept."""
    seconds: float = 0.0
    worker_killed: bool = False
    """Whether the call has no scores because its worker was killed from outside."""

    @classmethod
    def failed(cls, size: int, message: str, seconds: float = 0.0) -> "ScorerResult":
        """Returns a result without a score for any of `size` completions."""
        errors = dict.fromkeys(range(size), message)
        return cls([None] * size, errors, seconds=seconds)


class Scorer(Protocol):
    """Scores groups of completions. It is hashable, and workers can call its `run`."""

    name: str
    is_async: bool
    """Whether `run_async` is called instead of `run`. Such calls wait together."""
    on_failure: FailurePolicy
    scope: Scope
    """One call scores one prompt's group, or the batch: all completions that the replica samples together."""
    time_limit_seconds: float
    """Time limit for one call; 0 means no limit."""
    weight: float
    """Factor of its scores in the reward; 0 for the judgement."""

    def run(self, groups: Groups, state: Any) -> ScorerResult:
        """Score the groups in one call without a time limit. An exception becomes a result with errors.

        Args:
            state: of `Services.reward_state`; None outside a run.
        """

    async def run_async(self, groups: Groups, state: Any) -> ScorerResult:
        """The same within the time limit."""


class RewardScorer(Scorer, Protocol):
    """A scorer whose scores are rewards."""

    of_turns: bool
    """Whether its score is the sum of the turns' rewards from the environment."""
