"""running_sum: add numbers that come one by one, more of them than fit into the window."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_rl.core.config import number
from torchtitan_rl.core.generator.conversation import Conversation
from torchtitan_rl.library.environments import Context, Environment, Message, Turn
from torchtitan_rl.library.environments.fitted import FittedEnvironment
from torchtitan_rl.library.task import Example, Task
from torchtitan_rl.library.tasks.procedural import ProceduralTask, asked

if TYPE_CHECKING:
    from torchtitan_rl.core.types import Prompt


class RunningSum(ProceduralTask):
    """A sum of two digits and numbers from 1 to 9, which are added one by one. The reward is +1 for the right last sum,
    else -1.

    Sums are modulo 100, so every step is alike. The policy writes the sum after each number. With `compact_tokens` the
    environment replaces the history by the policy's last sum when it has become long, which opens a trace.
    """

    name = "running_sum"
    more_with = ", or set a larger task.numbers"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        numbers: int = number(6, least=1, most=50)
        """How many numbers are added."""

        compact_tokens: int | None = number(None, least=1, remedy="Leave it out for one growing conversation.")
        """Tokens of the history from which on the environment replaces it. None: it never does."""

    def environment(self, prompt: "Prompt") -> Environment:
        """Returns the one who reads out the numbers."""
        return Numbers(prompt.columns["numbers"], self.config.compact_tokens)

    def extract_answer(self, text: str) -> str | None:
        """Returns the last sum, if all numbers were added."""
        has_all = text.count("\n") + 1 >= self.config.numbers
        return _sum(text.rpartition("\n")[2]) if has_all else None

    def draw(self, rng: random.Random) -> tuple[int, tuple[int, ...]]:
        """Returns the number to begin with and those to add."""
        return rng.randrange(100), tuple(rng.randint(1, 9) for _ in range(self.config.numbers))

    def example(self, problem: tuple[int, tuple[int, ...]]) -> Example:
        start, numbers = problem
        answer = f"{(start + sum(numbers)) % 100:02d}"
        return asked(context(f"{start:02d}", numbers[0]), answer, start=start, numbers=list(numbers))


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
