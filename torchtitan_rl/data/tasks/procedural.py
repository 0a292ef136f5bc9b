"""Tasks whose problems are drawn at random, and of which one in eight is held out."""

import hashlib
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torchtitan_rl.data.task import Example, RewardFunction, Task
from torchtitan_rl.errors import expect


def is_held_out(key: str) -> bool:
    """Returns whether a problem, as text, is held out: one in eight, independent of the run's seed."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 8 == 0


def plain_example(question: str, answer: str, **columns: Any) -> Example:
    """Returns an example that asks a question, as a user's message and as plain text."""
    messages = [{"role": "user", "content": question}]
    return Example(text=question + "\n", messages=messages, expected_answer=answer, columns=columns)


class ProceduralTask(Task):
    """A subclass draws problems of any type from both splits, and makes examples of them."""

    name: ClassVar[str]
    """The task's name in the seeds of its random generators."""
    more_with: ClassVar[str] = ""
    """The remedy of an error, beside fewer prompts: a setting with which there are more problems."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """Returns a random problem."""

    def draws(self, key: str) -> Iterator[Any]:
        """Yields problems from both splits without end, determined by `key`."""
        rng = random.Random(f"{self.name}/{key}")
        while True:
            yield self.draw(rng)

    @abstractmethod
    def example(self, problem: Any) -> Example:
        """Returns the problem as an example."""

    def key(self, problem: Any) -> str:
        """Returns a text that tells problems apart. Those with one key are held out together."""
        return str(problem)

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns a random example that is not held out, a pure function of (seed, index)."""
        problems = self.draws(f"{seed}/{index}")
        return self.example(next(p for p in problems if not is_held_out(self.key(p))))

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different examples from the held-out eighth, independent of the run's seed."""
        problems = self.draws("held_out")
        chosen: dict[str, Example] = {}
        repeated = 0
        # In a pool of P problems, even one that is drawn half as often as others is missed by 50 P draws with probability e^-25.
        while len(chosen) < num and repeated < 50 * (len(chosen) + 100):
            problem = next(problems)
            key = self.key(problem)
            if is_held_out(key):
                repeated = repeated + 1 if key in chosen else 0
                chosen.setdefault(key, self.example(problem))
        expected = f"at most {len(chosen)}, the distinct held-out prompts of this task"
        remedy = f"Ask for fewer{self.more_with}."
        expect(len(chosen) == num, "evaluation.num_prompts", num, expected, remedy)
        return list(chosen.values())

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (self.correct,)

    def correct(self, *, completions: list, expected_answer: list[str], **_: Any) -> list[float]:
        """+1 for the right answer, -1 for a wrong one or none."""
        answers = map(self.answer, completions)
        return [
            1.0 if self.is_correct(a, e) else -1.0
            for a, e in zip(answers, expected_answer, strict=True)
        ]
