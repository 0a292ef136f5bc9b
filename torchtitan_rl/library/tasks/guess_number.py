"""guess_number: find a number in a few guesses, each answered "higher" or "lower"."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.library.environments import Environment, Message, Turn, environment_reward
from torchtitan_rl.library.task import Example, RewardFunction, Task

if TYPE_CHECKING:
    from torchtitan_rl.core.types import Prompt

LOWEST, HIGHEST = 10, 99
"""Every number lies in this range."""

_HELD_OUT_ONE_IN = 8


class GuessNumber(Task):
    """One secret of `span` neighbouring numbers; the reward is 1 for finding it, less `guess_cost` for each guess that missed.

    conversations.max_turns is the number of guesses: with k of them 2^k - 1 numbers can always be told apart.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        span: int = number(15, least=2, most=HIGHEST - LOWEST)
        """How many numbers there are to choose from."""

        guess_cost: float = number(0.05, least=0)
        """Reward taken for each guess that is not the number."""

    def train_example(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"guess_number/{seed}/{index}")
        while _is_held_out(drawn := self._draw(rng)):
            pass
        return self._example(*drawn)

    def held_out_examples(self, num: int) -> list[Example]:
        """`num` different games, one in eight of all, the same whatever the run's seed."""
        lowest = range(LOWEST, HIGHEST - self.config.span + 2)
        games = [(low, low + place) for low in lowest for place in range(self.config.span)]
        games = [game for game in games if _is_held_out(game)]
        expect(
            num <= len(games), "evaluation.num_prompts", num, f"at most the {len(games)} held-out games", "Lower it."
        )
        return [self._example(*game) for game in random.Random("guess_number/held_out").sample(games, num)]

    def environment(self, prompt: "Prompt") -> Environment:
        return HigherLower(int(prompt.expected_answer), self.config.guess_cost)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (environment_reward,)

    def extract_answer(self, text: str) -> str | None:
        """The last guess."""
        return _number(text.rpartition("\n")[2])

    def _draw(self, rng: random.Random) -> tuple[int, int]:
        low = rng.randint(LOWEST, HIGHEST - self.config.span + 1)
        return low, low + rng.randrange(self.config.span)

    def _example(self, low: int, secret: int) -> Example:
        question = f"Guess my number from {low} to {low + self.config.span - 1}."
        return Example(
            text=question + "\n",
            messages=[{"role": "user", "content": question}],
            expected_answer=str(secret),
            columns={"low": low, "high": low + self.config.span - 1},
        )


class HigherLower(Environment):
    """Says whether the secret is higher or lower than each guess, until it is found."""

    def __init__(self, secret: int, guess_cost: float) -> None:
        self._secret = secret
        self._guess_cost = guess_cost

    def step(self, message: Message) -> Turn:
        guess = _number(message["content"])
        if guess == str(self._secret):
            return Turn(messages=[_said("right")], reward=1.0, done=True)
        told = "write a number" if guess is None else "higher" if int(guess) < self._secret else "lower"
        return Turn(messages=[_said(told)], reward=-self._guess_cost)


def _said(text: str) -> Message:
    return {"role": "user", "content": text}


def _number(text: str) -> str | None:
    """The text as a number, without leading zeros; None when it is none."""
    return str(int(text)) if re.fullmatch(r"[0-9]{1,9}", text := text.strip()) else None


def _is_held_out(game: tuple[int, int]) -> bool:
    key = hashlib.blake2b(str(game).encode(), digest_size=8).digest()
    return key[0] % _HELD_OUT_ONE_IN == 0
