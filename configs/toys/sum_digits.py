"""sum_digits: add a few two-digit integers and write the sum after an [ANSWER] tag."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.data.task import Example, RewardFunction, Task, completion_text
from torchtitan_rl.data.tasks.procedural import ProceduralTask, plain_example
from torchtitan_rl.data.tool_calls import without_thinking
from torchtitan_rl.fields.number import number

SMALLEST, LARGEST = 10, 99
"""The range of all operands, inclusive."""

ANSWER_TAG = "[ANSWER]"

# At most 18 digits, because int() raises for more than 4,300 digits, which a policy may well write. The lookahead
# prevents "132.5" and "1,320" from being read as 132 and 1.
ANSWER = re.compile(re.escape(ANSWER_TAG) + r"\s*([+-]?[0-9]{1,18})(?![.,]?[0-9])")


class SumDigits(ProceduralTask):
    """Prompts with a few integers in 10-99 to add. The reward is +1 or -1 for the sum, plus 0.2 for the format.

    The format is exactly one [ANSWER] tag with an integer after it; it is rewarded even if the sum is wrong. The last
    tag counts as the answer, so guessing several sums gains nothing.
    """

    name = "sum_digits"
    more_with = ", or set a larger task.max_integers"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        min_integers: int = number(2, least=2, remedy="Raise it.")
        """Fewest integers in a prompt, at least 2."""

        max_integers: int = number(4, least="min_integers", most=1000, remedy="Change one of them.")
        """Most integers in a prompt."""

        instruction: str = "Write [ANSWER] and then the sum, for example: [ANSWER] 55"
        """Text after the question in each prompt. Leave it empty for a policy that already knows the format. If
        hf_assets_path is empty too, the run trains such a starting policy itself, one that adds two integers."""

        def start_checkpoint(self, cache_root: Path) -> Path | None:
            """Returns the starting checkpoint of the recipe `sums`; None if the prompts have an instruction."""
            if self.instruction:
                return None
            from torchtitan_rl.configs.toys.answer_recipes import (
                sums,  # imports transformers' models
            )

            return sums().checkpoint(debug_task().build(), cache_root)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.correct, self.format)

    def format(self, *, completions: list, **_) -> list[float]:
        """0.2 for exactly one tag with an integer after it, else 0."""
        return [
            0.2 if is_well_formed(completion_text(completion)) else 0.0
            for completion in completions
        ]

    def extract_answer(self, text: str) -> str | None:
        """Returns the integer after the last tag, as `tagged_integer` reads it."""
        return tagged_integer(text)

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """Returns random operands."""
        count = rng.randint(self.config.min_integers, self.config.max_integers)
        return tuple(rng.randint(SMALLEST, LARGEST) for _ in range(count))

    def key(self, problem: tuple[int, ...]) -> str:
        """Returns the operands in order: 47 + 85 and 85 + 47 count as one."""
        return "+".join(map(str, sorted(problem)))

    def example(self, problem: tuple[int, ...]) -> Example:
        question = f"What is {' + '.join(map(str, problem))}? {self.config.instruction}".rstrip()
        return plain_example(question, str(sum(problem)), operands=list(problem))


def tagged_integer(text: str) -> str | None:
    """Returns the integer after the last tag, without a plus sign or leading zeros: "[ANSWER] 0132" gives "132"."""
    text = without_thinking(text)
    answer = ANSWER.match(text, text.rfind(ANSWER_TAG)) if ANSWER_TAG in text else None
    return str(int(answer.group(1))) if answer else None


def debug_task() -> SumDigits.Config:
    """Returns the task of the config `debug`. Its starting policy knows the format."""
    return SumDigits.Config(min_integers=2, max_integers=2, instruction="")


def is_well_formed(text: str) -> bool:
    """Returns whether `text` has exactly one [ANSWER] tag, with an integer after it."""
    return text.count(ANSWER_TAG) == 1 and ANSWER.search(text) is not None
