"""Advantages: pure functions of a group's rewards."""

from .base import Advantage, all_equal
from .group_mean import GroupMean
from .grpo import BatchStd, Grpo
from .rloo import Rloo

__all__ = ["Advantage", "BatchStd", "GroupMean", "Grpo", "Rloo", "all_equal"]
