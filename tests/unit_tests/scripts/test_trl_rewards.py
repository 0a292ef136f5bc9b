"""TRL's side of learn_vs_trl.py rewards what the tasks reward."""

import pytest

from scripts.bench import trl_rewards
from torchtitan_rl.configs.smollm2 import PlainSums
from torchtitan_rl.configs.toys.counting import Counting

TEXTS = [
    "", "8", "[ANSWER] 8", "[ANSWER] 8.5", "[ANSWER] 7 [ANSWER] 8", "[ANSWER] 8 [ANSWER]", "3 + 5 = 8",
    "3 + 5 = 8.", "The sum of 3 and 5 is 9, or -8", "8 is 3 + 5", "It is 8 (eight)", "**8**", "x8",
]  # fmt: skip


@pytest.mark.parametrize("task", [Counting.Config(), PlainSums.Config()], ids=["Counting", "PlainSums"])
def test_rewards_of_trls_side_are_those_of_the_task(task):
    given = {"completions": TEXTS, "expected_answer": ["8"] * len(TEXTS)}
    task = task.build()
    ours = {function.__name__: function(**given) for function in task.reward_functions()}
    theirs = {"correct": trl_rewards.correct(type(task).__name__)(**given)}
    if "format" in ours:
        theirs["format"] = trl_rewards.well_formed(**given)
    assert theirs == ours
    assert len(set(ours["correct"])) == 2
