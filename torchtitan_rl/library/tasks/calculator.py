"""calculator: multiply two integers with the tool `multiply`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.core.errors import expect
from torchtitan_rl.library.task import Example, RewardFunction, Task, completion_text
from torchtitan_rl.library.tasks.sum_digits import LARGEST, SMALLEST, is_held_out, tagged_integer


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


class Calculator(Task):
    """Prompts with two integers in 10-99 to multiply. The reward is +1 for the right product after [ANSWER], else -1.

    The policy may call `multiply`. Only its final answer is rewarded, not the call.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        instruction: str = "Write [ANSWER] and then the product, for example: [ANSWER] 550"
        """Text after the question in each prompt. Leave it empty for a policy that already knows the format."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns a product that is not held out."""
        rng = random.Random(f"calculator/{seed}/{index}")
        while is_held_out(factors := _draw(rng)):
            pass
        return self._example(*factors)

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different products from the held-out eighth, independent of the run's seed."""
        pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1) if is_held_out((a, b))]
        expect(
            num <= len(pairs), "evaluation.num_prompts", num, f"at most the {len(pairs)} held-out products", "Lower it."
        )
        return [self._example(*pair) for pair in random.Random("calculator/held_out").sample(pairs, num)]

    def tools(self) -> Sequence[Callable[..., Any]]:
        return (multiply,)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.correct,)

    def correct(self, *, completions: list, expected_answer: list[str], **_: Any) -> list[float]:
        """+1 for the right product, -1 for a wrong one or none."""
        answers = [self.extract_answer(completion_text(completion)) for completion in completions]
        return [1.0 if self.is_correct(a, e) else -1.0 for a, e in zip(answers, expected_answer, strict=True)]

    def extract_answer(self, text: str) -> str | None:
        """Returns the integer after the last tag."""
        return tagged_integer(text)

    def _example(self, a: int, b: int) -> Example:
        question = f"What is {a} * {b}? {self.config.instruction}".rstrip()
        return Example(
            text=question + "\n",
            messages=[{"role": "user", "content": question}],
            expected_answer=str(a * b),
            columns={"factors": [a, b]},
        )


def _draw(rng: random.Random) -> tuple[int, int]:
    return rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
