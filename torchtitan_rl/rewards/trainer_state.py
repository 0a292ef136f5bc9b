"""What reward functions get to know of the run."""

import os
from dataclasses import dataclass, field
from typing import Any


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
