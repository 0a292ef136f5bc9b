"""Which groups are left out of the loss, beside those whose rewards are all equal."""

from abc import ABC, abstractmethod

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.core.own_config import OwnConfig
from torchtitan_rl.core.types import Group, ScoredCompletion


class GroupFilter(OwnConfig, ABC):
    """Leaves whole groups out of the loss. With `algorithm.zero_variance` "refill" new prompts replace them."""

    @abstractmethod
    def left_out(self, group: Group[ScoredCompletion]) -> str | None:
        """Why the group is left out, in a few words such as "too easy"; None if it is not.

        It depends on the group alone, because it is asked several times in a step, on every rank.
        """

    def reason(self, group: Group[ScoredCompletion]) -> str | None:
        """`left_out`'s result. Raises UserError unless it is a text or None."""
        found = self.left_out(group)
        if found is None or (isinstance(found, str) and found):
            return found
        raise UserError(
            f"algorithm.group_filter: {type(self).__qualname__}.left_out returned {found!r:.80}: expected the reason as "
            "a text, or None to keep the group."
        )
