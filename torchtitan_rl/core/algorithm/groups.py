"""`GroupScale`: a factor on all advantages of a group."""

from abc import ABC, abstractmethod

from torchtitan_rl.core.config import OwnConfig
from torchtitan_rl.core.types import Episode, Group, Metric


class GroupScale(OwnConfig, ABC):
    """Scales a group's advantages by what its completions have in common."""

    @abstractmethod
    def scale(self, group: Group[Episode]) -> float:
        """The factor on the group's advantages."""

    def metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """Metrics of the step's groups."""
        return {}
