"""What serves a run without being read to understand it: the controller calls these, `train.py` hands it real ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchtitan_rl.core.types import Episode, Group, Metric, Prompt

if TYPE_CHECKING:
    from torchtitan_rl.core.evaluation import EvaluationPass
    from torchtitan_rl.core.state import RunState
    from torchtitan_rl.core.trainer.optimizer import UpdateReport


class Prompts(Protocol):
    """The data, tokenised; every rank gets the same prompts. Its position is part of a checkpoint."""

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        """The next training prompts, with prompt_idx first_idx, first_idx + 1, ..."""

    def held_out(self, num: int) -> list[Prompt]:
        """The first `num` held-out prompts; the same at every call."""

    def metrics(self, num_seen: int) -> dict[str, Metric]:
        """How far the data has been gone through after `num_seen` prompts."""


class Observer(Protocol):
    """Turns what happened into metrics, tables and files. None of its methods can change training."""

    def step(self, groups: Sequence[Group[Episode]], update: "UpdateReport", state: "RunState") -> None:
        """A step is done; `state` counts it already."""

    def evaluation(
        self, passes: Mapping["EvaluationPass", Sequence[Group[Episode]]], state: "RunState"
    ) -> dict[str, float]:
        """The held-out prompts were sampled in these ways. Returns the evaluation's metrics by name."""

    def flush(self, step: int) -> None:
        """Merge what all ranks recorded and write it. Collective, once a step."""

    def close(self) -> None:
        """Write what waits."""


class Checkpoints(Protocol):
    """Saves the run."""

    def save(self, step: int, *, last_step: bool = False) -> bool:
        """Save when due; whether it is saved. Collective."""

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, the current one, as the best so far."""


class Stop(Protocol):
    """A request to end the run after the current step."""

    number: int
    """The signal that asked; 0 for none."""

    def arm(self) -> None:
        """Listen for signals, again: other people's code may have taken them over."""


@dataclass(kw_only=True, slots=True)
class Services:
    """All of them, for one run."""

    prompts: Prompts
    observer: Observer
    checkpoints: Checkpoints
    stop: Stop
    run_folder: Path
