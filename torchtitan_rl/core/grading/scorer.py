"""What the grader asks of a scorer: a reward function, or the task's judgement. `library/scoring/` calls them as TRL
does."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torchtitan_rl.core.errors import TrainingStopped
from torchtitan_rl.core.types import Completion, Group

FailurePolicy = Literal["raise", "none"]
Scope = Literal["group", "batch"]
Groups = Sequence[Group[Completion]]


class RewardError(TrainingStopped):
    """A reward function raised, took too long, or did not return scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of the run, passed to reward functions as `trainer_state`, with all fields of transformers' TrainerState.

    Those without a docstring have no meaning here and keep transformers' default.
    """

    global_step: int = 0
    """Number of the step that sampled the completions; 0 before the first."""
    max_steps: int = 0
    """Number of steps in the whole run."""
    epoch: float = 0.0
    """Passes over the training examples so far; 0 if they never repeat."""
    num_input_tokens_seen: int = 0
    """Prompt and completion tokens that the trainer has processed."""
    train_batch_size: int | None = None
    """Completions of a step."""
    logging_steps: int = 1
    """Every step is logged."""
    eval_steps: int = 0
    """Steps between evaluations; 0 for none."""
    best_metric: float | None = None
    """Best value of `evaluation.best_by` so far; None before the first, or without `best_by`."""
    best_global_step: int | None = None
    """Step of `best_metric`."""
    is_world_process_zero: bool = field(default_factory=lambda: os.environ.get("RANK", "0") == "0")
    """Whether the function scores for rank 0."""
    is_local_process_zero: bool = field(
        default_factory=lambda: os.environ.get("LOCAL_RANK", "0") == "0"
    )
    """Whether the function scores for local rank 0."""
    save_steps: int = 500
    num_train_epochs: int = 0
    total_flos: float = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_model_checkpoint: str | None = None
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


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

    def run(self, groups: Groups, state: TrainerState) -> ScorerResult:
        """Score the groups in one call without a time limit. An exception becomes a result with errors."""

    async def run_async(self, groups: Groups, state: TrainerState) -> ScorerResult:
        """The same within the time limit."""


class RewardScorer(Scorer, Protocol):
    """A scorer whose scores are rewards."""

    of_turns: bool
    """Whether its score is the sum of the turns' rewards from the environment."""
