"""Grading: reward functions in TRL's form, their weighted sum, and what they may log."""

from torchtitan_rl.core.grading.grader import Grader
from torchtitan_rl.core.grading.reward import RewardError, TrainerState

__all__ = ["Grader", "RewardError", "TrainerState"]
