"""Interfaces to the rings: the core calls these objects, and `train.py` hands it the real ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_rl.types import (
    Completion,
    Episode,
    EvaluationPass,
    FloatArray,
    Group,
    IntArray,
    Metric,
    Prompt,
    ScoredCompletion,
)

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan_rl.evaluation import Evaluation
    from torchtitan_rl.generator.generator import Generator
    from torchtitan_rl.state import RunState
    from torchtitan_rl.trainer.optimizer import UpdateReport


class Prompts(Protocol):
    """The tokenised data. Every rank gets the same prompts, and checkpoints contain the position."""

    def next_batch(self, num_prompts: int, *, first_idx: int = 0) -> list[Prompt]:
        """The next training prompts, with prompt_idx first_idx, first_idx + 1, ..."""

    def at(self, stream_idx: int) -> Prompt:
        """The training prompt with this `stream_idx`, prompt_idx 0."""

    def observe(self, groups: Sequence[Group[Episode]]) -> None:
        """Called with each step's credited groups, equal on every rank, before the next step's prompts are asked for. A
        curriculum learns from them what to ask next."""

    def held_out(self, num: int) -> list[Prompt]:
        """The first `num` held-out prompts; the same at every call."""

    def epoch(self, num_seen: int) -> float | None:
        """Passes over the data after `num_seen` prompts; None if they never repeat."""

    def metrics(self, num_seen: int) -> dict[str, Metric]:
        """Progress through the data after `num_seen` prompts."""


class GroupsInFlight(Protocol):
    """Samples a step's prompts. Groups that are not whole when enough others are go on in the next step.

    The groups that are carried from step to step are equal on every rank: `generator.in_flight.InFlight`. With
    `generator.demonstrations.Demonstrations` the groups come from the data.
    """

    needs_engine: bool
    """Whether the engine samples, so that it needs the policy after each update."""

    def num_new(self, needed: int) -> int:
        """How many prompts a step of `needed` groups begins."""

    def admit(self, new: Sequence[Prompt]) -> list[Prompt]:
        """The carried prompts and the new ones, by prompt_idx."""

    def sample(
        self,
        generator: "Generator",
        prompts: Sequence[Prompt],
        *,
        needed: int,
        step: int,
        round: int,
    ) -> Iterator[Group[Completion]]:
        """Yields this replica's share of `needed` groups, each when it is whole, and keeps the others."""

    def gather(self, generator: "Generator") -> None:
        """Carry the kept groups of all replicas. Collective; called when the groups of `sample` are gathered."""


class Observer(Protocol):
    """Turns the facts of a step into metrics, tables and files. No method can change training."""

    def keep(
        self,
        groups: Sequence[Group[Completion] | Group[ScoredCompletion] | Group[Episode]],
        *,
        step: int,
        split: str,
    ) -> None:
        """Called as soon as groups are sampled, graded and credited. `close` writes those of a step that is never
        whole."""

    def step(
        self, groups: Sequence[Group[Episode]], update: "UpdateReport", state: "RunState"
    ) -> None:
        """Called after each step; `state` already counts it."""

    def evaluation(
        self,
        passes: Mapping[EvaluationPass, Sequence[Group[Episode]]],
        state: "RunState",
        measured: Mapping[str, float],
    ) -> dict[str, float]:
        """Returns the evaluation's metrics by name: those of each pass's held-out groups, and those `measured`."""

    def flush(self, step: int) -> None:
        """Merge and write the metrics of all ranks. Collective; called once a step."""

    def close(self) -> None:
        """Write everything that is still pending."""


class Checkpoints(Protocol):
    """Saves the run."""

    def save(self, step: int, *, last_step: bool = False) -> bool:
        """Save if a checkpoint is due; returns whether the step is saved. Collective."""

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of the current `step` as the best so far."""


class Sync(Protocol):
    """Copies the policy into the engine and verifies it there: `sync.weight_sync.WeightSync`."""

    def push(
        self,
        weights: "Iterable[tuple[str, Tensor]]",
        generator: "Generator",
        *,
        policy_version: int,
        probe: IntArray,
        trainer_logprobs: Callable[[IntArray], FloatArray],
    ) -> int:
        """Load the weights and return their size in bytes. Raises on every rank if the engine differs. Collective.

        Args:
            weights: of `trainer.hf_weights`, gathered while they are read.
            policy_version: recorded on every completion sampled after this push.
            probe: token ids [L] that both sides may score.
            trainer_logprobs: computes the policy's log-probabilities of probe[1:], [L - 1].
        """

    def evidence(self, generator: "Generator") -> str:
        """Returns what is known of the engine's weights when a SamplerFault is raised, as sentences. Collective."""


class Stop(Protocol):
    """A request to end the run after the current step."""

    number: int
    """The signal that was received; 0 for none."""

    def arm(self) -> None:
        """Install the signal handlers again, in case a library has replaced them."""


@dataclass(kw_only=True, slots=True)
class Services:
    """The services of one run."""

    prompts: Prompts
    observer: Observer
    weight_sync: Sync
    checkpoints: Checkpoints
    stop: Stop
    check_replicated: Callable[[int, Sequence[Prompt] | Sequence[Group[Episode]]], None]
    """Raises on every rank unless all ranks pass the same step and values: they would wait for each other forever.
    Collective."""
    reward_state: "Callable[[RunState, Evaluation], Any]"
    """Returns what reward functions get to know of the run."""
    measure: Callable[[Mapping[EvaluationPass, Sequence[Group[Episode]]]], dict[str, float]]
    """Returns further metrics of the held-out prompts, by name, given each pass's episodes. Collective."""
    run_folder: Path
