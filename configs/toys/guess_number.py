"""guess_number: find a number in a few guesses, each answered "higher" or "lower"."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.data.task import Example, RewardFunction, Task
from torchtitan_rl.data.tasks.procedural import ProceduralTask, is_held_out, plain_example
from torchtitan_rl.data.turns import Environment, Message, Turn, environment_reward
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number

if TYPE_CHECKING:
    from torchtitan_rl.types import Prompt

LOWEST, HIGHEST = 10, 99
"""The range of all numbers, inclusive."""


class GuessNumber(ProceduralTask):
    """Find a secret among `span` consecutive numbers. The reward is 1 for success, minus `guess_cost` per wrong guess.

    conversations.max_turns is the number of guesses: k guesses always suffice for 2^k - 1 numbers.
    """

    name = "guess_number"

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        span: int = number(15, least=2, most=HIGHEST - LOWEST)
        """Number of possible secrets in a prompt."""

        guess_cost: float = number(0.05, least=0)
        """Amount subtracted from the reward for each wrong guess."""

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns `num` different games from the held-out eighth, independent of the run's seed."""
        lowest = range(LOWEST, HIGHEST - self.config.span + 2)
        games = [(low, low + place) for low in lowest for place in range(self.config.span)]
        games = [game for game in games if is_held_out(self.key(game))]
        expect(
            num <= len(games),
            "evaluation.num_prompts",
            num,
            f"at most the {len(games)} held-out games",
            "Lower it.",
        )
        return [
            self.example(game) for game in random.Random("guess_number/held_out").sample(games, num)
        ]

    def environment(self, prompt: "Prompt") -> Environment:
        """Returns the opponent who knows the prompt's number."""
        return HigherLower(int(prompt.expected_answer), self.config.guess_cost)

    def reward_functions(self) -> Sequence[RewardFunction]:
        return (environment_reward,)

    def extract_answer(self, text: str) -> str | None:
        """Returns the last guess."""
        return _number(text.rpartition("\n")[2])

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Returns the lowest number of a prompt and the secret."""
        low = rng.randint(LOWEST, HIGHEST - self.config.span + 1)
        return low, low + rng.randrange(self.config.span)

    def example(self, problem: tuple[int, int]) -> Example:
        low, secret = problem
        high = low + self.config.span - 1
        return plain_example(
            f"Guess my number from {low} to {high}.", str(secret), low=low, high=high
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
        reply = (
            "write a number"
            if guess is None
            else "higher"
            if int(guess) < self._secret
            else "lower"
        )
        return Turn(messages=[_user_message(reply)], reward=-self._guess_cost)


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _number(text: str) -> str | None:
    """Returns the number without leading zeros, or None if the text is not a number."""
    return str(int(text)) if re.fullmatch(r"[0-9]{1,9}", text := text.strip()) else None
