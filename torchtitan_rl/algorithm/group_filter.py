"""Which groups are left out of the loss, beside those whose rewards are all equal."""

from abc import ABC, abstractmethod

from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Group, ScoredCompletion


class GroupFilter(OwnConfig, ABC):
    """Leaves whole groups out of the loss. With `algorithm.zero_variance` "refill" new prompts replace them."""

    @abstractmethod
    def left_out(self, group: Group[ScoredCompletion]) -> str | None:
        """Why the group is left out, in a few words such as "too easy"; None if it is not.

        It depends on the group alone, because it is asked several times in a step, on every rank.
        """
