"""Tasks: the examples that become prompts, the task's reward functions, and the judgement of answers."""

from torchtitan_rl.library.task import Example, RewardFunction, Task, completion_text
from torchtitan_rl.library.tasks.calculator import Calculator
from torchtitan_rl.library.tasks.guess_number import GuessNumber
from torchtitan_rl.library.tasks.rows import Rows
from torchtitan_rl.library.tasks.sum_digits import SumDigits
