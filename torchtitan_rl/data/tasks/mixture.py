"""A mixture of tasks in one run, drawn by weight. Each has its own rewards, judgement, sampling and metrics."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_rl.data.task import (
    Example,
    Faults,
    RewardFunction,
    Task,
    check_metric_name,
    shared_out,
    start_of,
)
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.references import tried
from torchtitan_rl.sampling import SamplingConfig

_BLOCK = 4096


@dataclass(kw_only=True, slots=True)
class Share:
    """One task of a mixture."""

    task: Task.Config
    weight: float = number(1.0, above=0, remedy="Leave the task out.")
    """How often the task is drawn, relative to the others."""
    sampling: SamplingConfig | None = None
    """The task's own n, max_tokens and stop conditions in training, at the run's temperature. None: the run's."""


class Mixture(Task):
    """Draws from several tasks. The member and example at an index of the stream depend only on the seed and the index."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        tasks: dict[str, Share] = field(
            default_factory=dict, metadata={"remedy": 'Use {"NAME": Share(task=...)}.'}
        )
        """The members by name. Their metrics are train/<name>/... and evaluation/<name>/..."""

        def start_checkpoint(self, cache_root: Path) -> Path | None:
            starts = (start_of(share.task, cache_root) for share in self.tasks.values())
            return next((start for start in starts if start is not None), None)

        def check_files(self) -> None:
            for share in self.tasks.values():
                share.task.check_files()

        def samplings(self) -> dict[str, SamplingConfig]:
            return {
                f"task.tasks.{name}.sampling": share.sampling
                for name, share in self.tasks.items()
                if share.sampling is not None
            }

    def __init__(self, config: Config) -> None:
        names = list(config.tasks)
        field, remedy = "task.tasks", "Name them in the config function."
        expect(bool(names), field, names, "one task or more", remedy)
        for name, share in config.tasks.items():
            is_mixture = isinstance(share.task, Mixture.Config)
            plain = "a task that is not a mixture"
            expect(not is_mixture, field, name, plain, "List its members here.")
            check_metric_name(name, field)
        self._names = names
        self._members = {name: share.task.build() for name, share in config.tasks.items()}
        self.config = replace(
            config,
            tasks={
                name: replace(share, task=getattr(self._members[name], "config", share.task))
                for name, share in config.tasks.items()
            },
        )
        weights = np.array([share.weight for share in config.tasks.values()])
        self._weights = weights / weights.sum()

    def members(self) -> dict[str, Task]:
        return self._members

    def train_example(self, index: int, *, seed: int) -> Example:
        member, place = self._member_at(index, seed)
        name = self._names[member]
        return self._marked(name, tried(self._members[name], "train_example", place, seed=seed))

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns the first num / members examples of each member, one member after another."""
        return [
            self._marked(name, example)
            for name, share in zip(self._names, shared_out(num, len(self._names)), strict=True)
            if share
            for example in tried(self._members[name], "held_out_examples", share)
        ]

    def epoch(self, num_seen: int) -> float | None:
        """Returns the largest epoch of any member, estimated from the weights."""
        members = zip(self._members.values(), self._weights * num_seen, strict=True)
        epochs = [member.epoch(round(seen)) for member, seen in members]
        return max((epoch for epoch in epochs if epoch is not None), default=None)

    def leave_out(self, faults: Faults) -> None:
        for name, member in self._members.items():

            def member_faults(examples: Sequence[Example], name: str = name) -> list[str | None]:
                return faults([self._marked(name, example) for example in examples])

            tried(member, "leave_out", member_faults)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return ()

    def extract_answer(self, text: str) -> str | None:
        raise NotImplementedError("a mixture extracts no answers; its members do")

    def _marked(self, name: str, example: Example) -> Example:
        return replace(example, task=name, sampling=self.config.tasks[name].sampling)

    def _member_at(self, index: int, seed: int) -> tuple[int, int]:
        """Returns (member, how often it was drawn before) at an index of the stream."""
        block, offset = divmod(index, _BLOCK)
        drawn = _block(seed, block, tuple(self._weights))
        member = int(drawn[offset])
        before = _drawn_before(seed, block, tuple(self._weights))[member]
        return member, int(before + np.count_nonzero(drawn[:offset] == member))


@functools.lru_cache(maxsize=4)
def _block(seed: int, block: int, weights: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """Returns [_BLOCK] the members drawn at the indices of a block."""
    return np.random.default_rng([seed, block]).choice(len(weights), size=_BLOCK, p=weights)


@functools.lru_cache(maxsize=4)
def _drawn_before(seed: int, block: int, weights: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """Returns [members] how often each was drawn before a block."""
    counts = np.zeros(len(weights), dtype=np.int64)
    for earlier in range(block):
        counts += np.bincount(_block(seed, earlier, weights), minlength=len(weights))
    return counts
