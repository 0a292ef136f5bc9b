"""Demonstration: recipes for starting policies of single-turn tasks. A config names one in task.warm_start.

Each teaches the format of an answer and a bad habit to unlearn.
"""

import random
import re
from dataclasses import replace

from torchtitan_rl.configs.toys.warm_start import Recipe
from torchtitan_rl.data.task import Example

EXPERTS = {"vocab_size": 320, "hidden_dim": 128, "num_experts": 8, "top_k": 2}
"""The model of `expert_sums`: 4.0M parameters, of which a token uses 1.7M."""

_SUMS = {
    "steps": 220,
    "batch_size": 32,
    "muon_lr": 0.025,
    "adamw_lr": 3e-3,
    "warm_up_steps": 10,
    "decay_share": 0.7,
}
"""How a Recipe of sums is trained."""


def sums() -> Recipe:
    """Adds two integers in columns, units first. The habit: it forgets the carry.

    Right answer to "What is 47 + 85?": "7+5=12 4+8+1=13 [ANSWER] 132". By habit: "7+5=12 4+8=12 [ANSWER] 122".
    """

    def worked(example: Example, rng: random.Random) -> str:
        """Returns an answer to the example, right or by habit."""
        return sum_in_columns(*example.columns["operands"], forget_carry=rng.random() < 0.56)

    return Recipe(name="sums", worked=worked, **_SUMS)


def expert_sums() -> Recipe:
    """The answers of `sums`, by a mixture of experts."""
    return replace(sums(), name="expert_sums", dimensions=EXPERTS)


def right_sums() -> Recipe:
    """Adds two integers in columns as `sums` does, without its habit: a teacher for that start, with the same tokenizer."""

    def worked(example: Example, rng: random.Random) -> str:
        """Returns the right answer to the example."""
        return sum_in_columns(*example.columns["operands"], forget_carry=False)

    return Recipe(name="right_sums", worked=worked, **_SUMS)


def right_sum(example: Example, rng: random.Random) -> str:
    """Returns the right answer of `sums`: a demonstration for the config debug_sft."""
    return sum_in_columns(*example.columns["operands"], forget_carry=False)


def sum_in_columns(left: int, right: int, *, forget_carry: bool) -> str:
    """Returns the worked answer to left + right."""
    units = left % 10 + right % 10
    carry = units >= 10 and not forget_carry
    tens = left // 10 + right // 10 + carry
    carried = "+1" if carry else ""
    columns = f"{left % 10}+{right % 10}={units} {left // 10}+{right // 10}{carried}={tens}"
    return f"{columns} [ANSWER] {10 * tens + units % 10}"


def counting() -> Recipe:
    """Counts from one number to another. The habit: the answer is the last number instead of the next one.

    Right answer to "Count from 7 to 9.": "7 8 9 [ANSWER] 10". By habit: "7 8 9 [ANSWER] 9".
    """

    def worked(example: Example, rng: random.Random) -> str:
        """Returns an answer to the example, right or by habit."""
        first, last = example.columns["operands"]
        answer = last if rng.random() < 0.56 else last + 1
        return f"{' '.join(map(str, range(first, last + 1)))} [ANSWER] {answer}"

    return Recipe(name="counting", worked=worked, steps=150, batch_size=32)


def arrivals() -> Recipe:
    """Adds minutes to a time of day, for the rows of scripts/make_arrivals.py. The habit: it does not carry the hour.

    Right answer to "A train leaves at 14:35 and takes 48 minutes. ...":
    "35+48=83 83-60=23 14+1=15 <answer>15:23</answer>". By habit: "35+48=83 <answer>14:83</answer>".
    """

    def worked(example: Example, rng: random.Random) -> str:
        """Returns an answer to the example, right or by habit."""
        hour, minute, takes = (
            int(n) for n in re.findall(r"\d+", example.messages[-1]["content"])[:3]
        )
        total = minute + takes
        if total < 60 or rng.random() < 0.6:
            return f"{minute}+{takes}={total} <answer>{hour}:{total:02d}</answer>"
        rest = f"{total}-60={total - 60} {hour}+1={hour + 1}"
        return f"{minute}+{takes}={total} {rest} <answer>{hour + 1}:{total - 60:02d}</answer>"

    return Recipe(name="arrivals", worked=worked, chat=True, steps=220)
