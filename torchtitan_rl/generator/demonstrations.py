"""Learning from demonstrations (SFT): the loss, and the groups that come from the data in place of the generator."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan_rl.algorithm.losses.sft import check_demonstrated
from torchtitan_rl.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator


class Demonstrations:
    """The `services.GroupsInFlight` of demonstrations: a group is a prompt and the data's own completion."""

    needs_engine = False

    def num_new(self, needed: int) -> int:
        """Returns `needed`: each prompt is a whole group."""
        return needed

    def admit(self, new: Sequence[Prompt]) -> list[Prompt]:
        """Returns the new prompts; none are carried."""
        return list(new)

    def sample(
        self,
        generator: "Generator | NoEngine",
        prompts: Sequence[Prompt],
        *,
        needed: int,
        step: int,
        round: int,
    ) -> Iterator[Group[Completion]]:
        """Yields this replica's share of the groups."""
        for prompt in prompts[generator.replica :: generator.num_replicas]:
            check_demonstrated(prompt)
            yield Group(
                prompt=prompt, samples=[replace(prompt.demonstration, policy_version=step - 1)]
            )

    def gather(self, generator: "Generator | NoEngine") -> None:
        """Nothing is carried."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position in the data is the prompts' own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class NoEngine:
    """Stands for the generator in a run that samples nothing: each rank takes its share of the demonstrations."""

    rank_in_replica = 0

    def __init__(self) -> None:
        self.replica, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to stop."""
