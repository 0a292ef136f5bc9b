"""Tasks: what the policy is asked and how its answers are judged."""

from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.guess_number import GuessNumber
from torchtitan_rl.tasks.rows import Rows
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.task import Example, RewardFunction, Task, completion_text

__all__ = ["Calculator", "Example", "GuessNumber", "RewardFunction", "Rows", "SumDigits", "Task", "completion_text"]
