"""Tasks: the examples that become prompts, the task's reward functions, and the judgement of answers."""

from torchtitan_rl.data.rows import Rows
from torchtitan_rl.data.task import Example, RewardFunction, Task, completion_text
