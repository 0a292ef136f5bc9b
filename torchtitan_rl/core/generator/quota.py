"""What the core asks of groups in flight, which are sampled over several steps: a step ends when enough groups are whole."""

from collections.abc import Collection, Sequence
from typing import Protocol

from torchtitan_rl.core.generator.conversation import Conversation
from torchtitan_rl.core.types import Prompt


class Quota:
    """Decides which groups a call of one replica takes, as they become whole."""

    def __init__(self, size: int, urgent: Collection[int] = ()) -> None:
        """`size`: groups to take, among them the `urgent` ones, by prompt_idx."""
        self.left, self._urgent = size, set(urgent)

    def takes(self, prompt_idx: int) -> bool:
        """Whether the whole group of `prompt_idx` is taken. Room is kept for the urgent ones."""
        if prompt_idx not in self._urgent and self.left == len(self._urgent):
            return False
        self._urgent.discard(prompt_idx)
        self.left -= 1
        return True


class GroupsInFlight(Protocol):
    """The groups that are carried from step to step; equal on every rank between steps. See library/in_flight.py."""

    active: bool
    """Whether a step may begin or end with unfinished groups. Otherwise nothing below is called but `num_new` and `admit`."""

    def num_new(self, needed: int) -> int:
        """How many prompts a step of `needed` groups begins."""

    def admit(self, new: Sequence[Prompt]) -> list[Prompt]:
        """The carried prompts and the new ones, by prompt_idx."""

    def go_on(self, groups: Sequence[Sequence[Conversation]]) -> None:
        """Give the carried samples among `groups` their tokens."""

    def quota(self, mine: Sequence[Prompt], size: int, *, version: int) -> Quota:
        """The quota of a replica that samples `mine` with the policy `version`."""

    def keep(self, prompt: Prompt, conversations: Sequence[Conversation], *, version: int) -> None:
        """Carry a group of this replica."""

    def gather(self, *, speaks: bool, version: int) -> None:
        """Make the kept groups of all replicas, for which one rank each `speaks`, the carried ones. Collective."""
