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
"""The range of all numbers, inclusive."""

_HELD_OUT_ONE_IN = 8


class GuessNumber(Task):
    """Find a secret among `span` consecutive numbers. The reward is 1 for success, minus `guess_cost` per wrong guess.

    conversations.max_turns is the number of guesses: k guesses always suffice for 2^k - 1 numbers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        span: int = number(15, least=2, most=HIGHEST - LOWEST)
        """Number of possible secrets in a prompt."""

        guess_cost: float = number(0.05, least=0)
        """Amount subtracted from the reward for each wrong guess."""

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns a game that is not held out."""
        rng = random.Random(f"guess_number/{seed}/{index}")
        while _is_held_out(drawn := self._draw(rng)):
            pass
        return self._example(*drawn)

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different games from the held-out eighth, independent of the run's seed."""
        lowest = range(LOWEST, HIGHEST - self.config.span + 2)
        games = [(low, low + place) for low in lowest for place in range(self.config.span)]
        games = [game for game in games if _is_held_out(game)]
        expect(
            num <= len(games), "evaluation.num_prompts", num, f"at most the {len(games)} held-out games", "Lower it."
        )
        return [self._example(*game) for game in random.Random("guess_number/held_out").sample(games, num)]

    def environment(self, prompt: "Prompt") -> Environment:
        """Returns the opponent who knows the prompt's number."""
        return HigherLower(int(prompt.expected_answer), self.config.guess_cost)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (environment_reward,)

    def extract_answer(self, text: str) -> str | None:
        """Returns the last guess."""
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
    """Answers each guess with "higher" or "lower", until the secret is found."""

    def __init__(self, secret: int, guess_cost: float) -> None:
        self._secret = secret
        self._guess_cost = guess_cost

    def step(self, message: Message) -> Turn:
        """Answers one guess: reward 1 and the end if it is right, else minus the guess's cost."""
        guess = _number(message["content"])
        if guess == str(self._secret):
            return Turn(messages=[_user_message("right")], reward=1.0, done=True)
        reply = "write a number" if guess is None else "higher" if int(guess) < self._secret else "lower"
        return Turn(messages=[_user_message(reply)], reward=-self._guess_cost)


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _number(text: str) -> str | None:
    """Returns the number without leading zeros, or None if the text is not a number."""
    return str(int(text)) if re.fullmatch(r"[0-9]{1,9}", text := text.strip()) else None


def _is_held_out(game: tuple[int, int]) -> bool:
    key = hashlib.blake2b(str(game).encode(), digest_size=8).digest()
    return key[0] % _HELD_OUT_ONE_IN == 0
