"""calculator: multiply two integers with the tool `multiply`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.configs.toys.sum_digits import LARGEST, SMALLEST, tagged_integer
from torchtitan_rl.data.task import Example, Task
from torchtitan_rl.data.tasks.procedural import ProceduralTask, is_held_out, plain_example
from torchtitan_rl.errors import expect


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


class Calculator(ProceduralTask):
    """Prompts with two integers in 10-99 to multiply. The reward is +1 for the right product after [ANSWER], else -1.

    The policy may call `multiply`. Only its final answer is rewarded, not the call.
    """

    name = "calculator"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        instruction: str = "Write [ANSWER] and then the product, for example: [ANSWER] 550"
        """Text after the question in each prompt. Leave it empty for a policy that already knows the format."""

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different products from the held-out eighth, independent of the run's seed."""
        pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
        pairs = [pair for pair in pairs if is_held_out(self.key(pair))]
        expect(
            num <= len(pairs),
            "evaluation.num_prompts",
            num,
            f"at most the {len(pairs)} held-out products",
            "Lower it.",
        )
        return [
            self.example(pair) for pair in random.Random("calculator/held_out").sample(pairs, num)
        ]

    def tools(self) -> Sequence[Callable[..., Any]]:
        return (multiply,)

    def extract_answer(self, text: str) -> str | None:
        return tagged_integer(text)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)

    def key(self, problem: tuple[int, int]) -> str:
        return "+".join(map(str, sorted(problem)))

    def example(self, problem: tuple[int, int]) -> Example:
        a, b = problem
        return plain_example(
            f"What is {a} * {b}? {self.config.instruction}".rstrip(), str(a * b), factors=[a, b]
        )
