"""Learning from demonstrations (SFT): a step's groups come from the data in place of the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan_rl.algorithm.losses.sft import check_demonstrated
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.replicated import check_replicated
from torchtitan_rl.types import Completion, Group

if TYPE_CHECKING:
    from torchtitan_rl.generator.generator import Generator


class Demonstrations:
    """Stands for `InFlight` where each group is a prompt and the data's own completion."""

    def __init__(self, generator: "Generator | NoEngine", stream: PromptStream) -> None:
        self._generator = generator
        self._stream = stream

    @contextmanager
    def step_groups(
        self, needed: int, *, first_idx: int = 0, step: int, round: int = 0
    ) -> Iterator[Iterator[Group[Completion]]]:
        """In the context, iterate over this replica's share of a step's `needed` groups."""
        prompts = self._stream.next_batch(needed, first_idx=first_idx)
        check_replicated(step, prompts)
        share = prompts[self._generator.replica :: self._generator.num_replicas]
        for prompt in share:
            check_demonstrated(prompt)
        yield (
            Group(prompt=prompt, samples=[replace(prompt.demonstration, policy_version=step - 1)])
            for prompt in share
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position in the data is the prompts' own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


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
