"""Tasks: what the policy is asked and how its answers are judged."""

from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.task import Example, RewardFunction, Task, completion_text

__all__ = ["Example", "RewardFunction", "SumDigits", "Task", "completion_text"]
