"""counting: write the numbers from one to another, and then the next one. Most answers are short, a few are long."""

import random

from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.data.task import Example
from torchtitan_rl.data.tasks.procedural import plain_example

MOST = 48
"""Numbers after the first. One prompt in ten has 40 or more of them, half have 8 or fewer: a Pareto distribution."""


class Counting(SumDigits):
    """Prompts with two integers. The answer is the integer after the second; the format and the rewards are SumDigits's."""

    more_with = ""

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        first = rng.randint(1, 50)
        return first, first + min(MOST, int(4 * rng.paretovariate(1.0)))

    def example(self, problem: tuple[int, ...]) -> Example:
        first, last = problem
        return plain_example(
            f"Count from {first} to {last}.", str(last + 1), operands=[first, last]
        )
