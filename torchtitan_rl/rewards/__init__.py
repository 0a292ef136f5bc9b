"""Ready-made reward functions with TRL's signature. docs/rewards.md shows how to name them on the command line.

--grader.rewards torchtitan_rl.rewards:numeric 'torchtitan_rl.rewards:tags(["think", "answer"])'
"""

from torchtitan_rl.data.answers import final_answer
from torchtitan_rl.rewards.correctness import exact_match, math_answer, numeric
from torchtitan_rl.rewards.formats import boxed, json_object, regex, tags
from torchtitan_rl.rewards.grader import Grader
from torchtitan_rl.rewards.judge import Judge
from torchtitan_rl.rewards.scorer import RewardError
from torchtitan_rl.rewards.texts import length, repetition, script
from torchtitan_rl.rewards.trainer_state import TrainerState
