"""Ready-made reward functions with TRL's signature. docs/rewards.md shows how to name them on the command line.

--grader.rewards torchtitan_rl.library.rewards:numeric 'torchtitan_rl.library.rewards:tags(["think", "answer"])'
"""

from torchtitan_rl.library.answers import final_answer
from torchtitan_rl.library.rewards.correctness import exact_match, math_answer, numeric
from torchtitan_rl.library.rewards.formats import boxed, json_object, regex, tags
from torchtitan_rl.library.rewards.judge import Judge
from torchtitan_rl.library.rewards.texts import length, repetition, script
