"""Grading: rewards are computed in workers while others are sampled, and summed by weight."""

from torchtitan_rl.core.grading.grader import Grader
from torchtitan_rl.core.grading.scorer import RewardError

__all__ = ["Grader", "RewardError"]
