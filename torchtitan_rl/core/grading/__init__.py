"""Grading: reward functions with TRL's interface, their weighted sum, and their logging."""

from torchtitan_rl.core.grading.grader import Grader
from torchtitan_rl.core.grading.reward import RewardError, TrainerState

__all__ = ["Grader", "RewardError", "TrainerState"]
