"""Learning from demonstrations (SFT): a step's groups come from the data in place of the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchtitan_rl.algorithm.losses.sft import check_demonstrated
from torchtitan_rl.replicated import check_replicated
from torchtitan_rl.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator


class Demonstrations:
    """Stands for `InFlight` where each group is a prompt and the data's own completion."""

    def __init__(self, generator: "Generator | NoEngine") -> None:
        self._generator = generator

    def num_new(self, needed: int) -> int:
        """Returns how many new prompts a step of `needed` groups begins with."""
        return needed

    @contextmanager
    def step_groups(
        self, new: Sequence[Prompt], needed: int, *, step: int, round: int = 0
    ) -> Iterator[Iterator[Group[Completion]]]:
        """In the context, iterate over this replica's share of a step's groups, one for each new prompt."""
        check_replicated(step, new)
        share = new[self._generator.replica :: self._generator.num_replicas]
        for prompt in share:
            check_demonstrated(prompt)
        yield (
            Group(prompt=prompt, samples=[replace(prompt.demonstration, policy_version=step - 1)])
            for prompt in share
        )


class NoEngine:
    """Stands for the generator in a run that samples nothing: each rank takes its share of the demonstrations."""

    rank_in_replica = 0
    environments = None

    def __init__(self) -> None:
        self.replica, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to stop."""
