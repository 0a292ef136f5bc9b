"""counting: write the numbers from one to another, and then the next one. Most answers are short, a few are long."""

import random

from torchtitan_rl.library.task import Example
from torchtitan_rl.library.tasks.sum_digits import SumDigits

MOST = 48
"""Numbers after the first. One prompt in ten has 40 or more of them, half have 8 or fewer: a Pareto distribution."""


class Counting(SumDigits):
    """Prompts with two integers. The answer is the integer after the second; the format and the rewards are SumDigits's."""

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        first = rng.randint(1, 50)
        return first, first + min(MOST, int(4 * rng.paretovariate(1.0)))

    def _example(self, operands: tuple[int, ...]) -> Example:
        first, last = operands
        prompt = f"Count from {first} to {last}."
        return Example(
            text=prompt + "\n",
            expected_answer=str(last + 1),
            messages=[{"role": "user", "content": prompt}],
            columns={"operands": [first, last]},
        )
