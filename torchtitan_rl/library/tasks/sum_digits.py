"""sum_digits: add a few two-digit integers and write the sum after an [ANSWER] tag."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.library.task import Example, RewardFunction, Task, completion_text

SMALLEST, LARGEST = 10, 99
"""The range of all operands, inclusive."""

ANSWER_TAG = "[ANSWER]"

# At most 18 digits, because int() raises for more than 4,300 digits, which a policy may well write. The lookahead
# prevents "132.5" and "1,320" from being read as 132 and 1.
ANSWER = re.compile(re.escape(ANSWER_TAG) + r"\s*([+-]?[0-9]{1,18})(?![.,]?[0-9])")

_HELD_OUT_ONE_IN = 8


class SumDigits(Task):
    """Prompts with a few integers in 10-99 to add. The reward is +1 or -1 for the sum, plus 0.2 for the format.

    The format is exactly one [ANSWER] tag with an integer after it; it is rewarded even if the sum is wrong. The last
    tag counts as the answer, so guessing several sums gains nothing.
    """

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
            from torchtitan_rl.library.starts.answer_recipes import sums  # imports transformers' models
            from torchtitan_rl.library.starts.warm_start import ensure_checkpoint

            return ensure_checkpoint(debug_task().build(), sums(), cache_root)

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns a random training example, a pure function of (seed, index)."""
        rng = random.Random(f"sum_digits/{seed}/{index}")
        while is_held_out(operands := self._draw(rng)):
            pass
        return self._example(operands)

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` examples of distinct sums, independent of the run's seed. 47 + 85 and 85 + 47 count as one."""
        rng = random.Random("sum_digits/held_out")
        chosen: dict[tuple[int, ...], Example] = {}
        repeated = 0
        # In a pool of P sums, even the rarest kind (two equal operands) is missed by 50 P draws with probability e^-25.
        while len(chosen) < num and repeated < 50 * (len(chosen) + 100):
            if is_held_out(operands := self._draw(rng)):
                repeated = repeated + 1 if tuple(sorted(operands)) in chosen else 0
                chosen.setdefault(tuple(sorted(operands)), self._example(operands))
        expect(
            len(chosen) == num, "evaluation.num_prompts", num,
            f"at most {len(chosen)}, the distinct held-out prompts of this task",
            "Ask for fewer; sum_digits has more with a larger task.max_integers.",
        )  # fmt: skip
        return list(chosen.values())

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.correct, self.format)

    def correct(self, *, completions: list, expected_answer: list[str], **_) -> list[float]:
        """+1 for the right sum, -1 for a wrong one or none."""
        answers = [self.extract_answer(completion_text(completion)) for completion in completions]
        return [
            1.0 if self.is_correct(answer, expected) else -1.0
            for answer, expected in zip(answers, expected_answer, strict=True)
        ]

    def format(self, *, completions: list, **_) -> list[float]:
        """0.2 for exactly one tag with an integer after it, else 0."""
        return [0.2 if is_well_formed(completion_text(completion)) else 0.0 for completion in completions]

    def extract_answer(self, text: str) -> str | None:
        """Returns the integer after the last tag, as `tagged_integer` reads it."""
        return tagged_integer(text)

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        """Returns random operands from either split."""
        count = rng.randint(self.config.min_integers, self.config.max_integers)
        return tuple(rng.randint(SMALLEST, LARGEST) for _ in range(count))

    def _example(self, operands: tuple[int, ...]) -> Example:
        question = f"What is {' + '.join(map(str, operands))}?"
        prompt = f"{question} {self.config.instruction}".rstrip()
        return Example(
            text=prompt + "\n",
            expected_answer=str(sum(operands)),
            messages=[{"role": "user", "content": prompt}],
            columns={"operands": list(operands)},
        )


def tagged_integer(text: str) -> str | None:
    """Returns the integer after the last tag, without a plus sign or leading zeros: "[ANSWER] 0132" gives "132"."""
    answer = ANSWER.match(text, text.rfind(ANSWER_TAG)) if ANSWER_TAG in text else None
    return str(int(answer.group(1))) if answer else None


def debug_task() -> SumDigits.Config:
    """Returns the task of the config `debug`. Its starting policy knows the format."""
    return SumDigits.Config(min_integers=2, max_integers=2, instruction="")


def is_held_out(operands: Sequence[int]) -> bool:
    """Returns whether these operands are held out: one in eight, independent of their order and the run's seed."""
    key = "+".join(map(str, sorted(operands)))
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % _HELD_OUT_ONE_IN == 0


def is_well_formed(text: str) -> bool:
    """Returns whether `text` has exactly one [ANSWER] tag, with an integer after it."""
    return text.count(ANSWER_TAG) == 1 and ANSWER.search(text) is not None
