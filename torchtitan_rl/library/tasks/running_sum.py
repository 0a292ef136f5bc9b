"""running_sum: add numbers that come one by one, more of them than fit into the window."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.generator.conversation import Conversation
from torchtitan_rl.library.environments import Context, Environment, Message, Turn
from torchtitan_rl.library.environments.fitted import FittedEnvironment
from torchtitan_rl.library.task import Example, RewardFunction, Task, completion_text

if TYPE_CHECKING:
    from torchtitan_rl.core.types import Prompt

_HELD_OUT_ONE_IN = 8


class RunningSum(Task):
    """A sum of two digits and numbers from 1 to 9, which are added one by one. The reward is +1 for the right last sum,
    else -1.

    Sums are modulo 100, so every step is alike. The policy writes the sum after each number. With `compact_tokens` the
    environment replaces the history by the policy's last sum when it has become long, which opens a trace.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        numbers: int = number(6, least=1, most=50)
        """How many numbers are added."""

        compact_tokens: int | None = number(None, least=1, remedy="Leave it out for one growing conversation.")
        """Tokens of the history from which on the environment replaces it. None: it never does."""

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns a sum that is not held out."""
        rng = random.Random(f"running_sum/{seed}/{index}")
        while _is_held_out(drawn := self._draw(rng)):
            pass
        return self._example(*drawn)

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different sums from the held-out eighth, independent of the run's seed."""
        most = 100 * 9**self.config.numbers // (2 * _HELD_OUT_ONE_IN)
        expect(num <= most, "evaluation.num_prompts", num, f"at most {most} held-out sums", "Lower it.")
        rng, found = random.Random("running_sum/held_out"), {}
        while len(found) < num:
            if _is_held_out(drawn := self._draw(rng)):
                found[drawn] = self._example(*drawn)
        return list(found.values())

    def environment(self, prompt: "Prompt") -> Environment:
        """Returns the one who reads out the numbers."""
        return Numbers(prompt.columns["numbers"], self.config.compact_tokens)

    def reward_functions(self) -> Sequence[RewardFunction]:
        """Returns `correct`."""
        return (self.correct,)

    def correct(self, *, completions: list, expected_answer: list[str], **_: Any) -> list[float]:
        """+1 for the right last sum, -1 for another or if the conversation did not come to it."""
        texts = [completion_text(completion) for completion in completions]
        pairs = zip(texts, expected_answer, strict=True)
        return [1.0 if self._has_all(text) and self.extract_answer(text) == right else -1.0 for text, right in pairs]

    def extract_answer(self, text: str) -> str | None:
        """Returns the last sum, if all numbers were added."""
        return _sum(text.rpartition("\n")[2]) if self._has_all(text) else None

    def _has_all(self, text: str) -> bool:
        return text.count("\n") + 1 >= self.config.numbers

    def _draw(self, rng: random.Random) -> tuple[int, tuple[int, ...]]:
        return rng.randrange(100), tuple(rng.randint(1, 9) for _ in range(self.config.numbers))

    def _example(self, start: int, numbers: tuple[int, ...]) -> Example:
        question = context(f"{start:02d}", numbers[0])
        return Example(
            text=question + "\n",
            messages=[{"role": "user", "content": question}],
            expected_answer=f"{(start + sum(numbers)) % 100:02d}",
            columns={"start": start, "numbers": list(numbers)},
        )


def context(so_far: str, more: int) -> str:
    """Returns the message that a conversation begins with. Example: context("57", 8) == "Sum 57. Add 8." """
    return f"Sum {so_far}. {addition(more)}"


def addition(more: int) -> str:
    """Returns the message of one number. Example: addition(8) == "Add 8." """
    return f"Add {more}."


class Numbers(FittedEnvironment):
    """Reads out one number after another."""

    def __init__(self, numbers: Sequence[int], compact_tokens: int | None) -> None:
        self._left = list(numbers[1:])
        self._compact_tokens = compact_tokens
        self._conversation: Conversation | None = None

    def fit(self, *, conversation: Conversation, **facts: Any) -> None:
        """Adapt to a run, which calls this before the reset."""
        super().fit(conversation=conversation, **facts)
        self._conversation = conversation

    def step(self, message: Message) -> Turn:
        """Returns the next number: after the history, or after the policy's last sum alone if the history is long."""
        if not self._left:
            return Turn(done=True)
        more = self._left.pop(0)
        so_far = _sum(message["content"])
        long = self._compact_tokens is not None and len(self._conversation.context) >= self._compact_tokens
        if long and so_far is not None:
            opening = {"role": "user", "content": context(so_far, more)}
            return Turn(messages=Context([opening], reason="compacted"))
        return Turn(messages=[{"role": "user", "content": addition(more)}])


def _sum(text: str) -> str | None:
    """Returns the sum that a text consists of; None if it is anything else."""
    return text.strip() if re.fullmatch(r"[0-9]{2}", text.strip()) else None


def _is_held_out(drawn: tuple[int, tuple[int, ...]]) -> bool:
    key = hashlib.blake2b(str(drawn).encode(), digest_size=8).digest()
    return key[0] % _HELD_OUT_ONE_IN == 0
