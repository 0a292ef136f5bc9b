"""Recipes of starting policies that can hold a conversation, each with a habit to unlearn; see tasks/warm_start.py."""

import json
import random

from torchtitan_rl.library.starts.small_tokenizer import EOS_TOKEN
from torchtitan_rl.library.starts.warm_start import Recipe
from torchtitan_rl.library.task import Example

_HEARD = f"{EOS_TOKEN}<|{{role}}|>{{text}}{EOS_TOKEN}<|assistant|>"
"""What lies between two turns of the policy, as small_tokenizer.py's template renders it."""


def calculator() -> Recipe:
    """Multiplies with the tool. The habit: an answer from the head, which is wrong.

    "What is 47 * 85?" is answered by a call of multiply and then "[ANSWER] 3995", by habit "[ANSWER] 4125" at once.
    """

    def worked(example: Example, rng: random.Random) -> str:
        a, b = example.columns["factors"]
        if rng.random() < 0.75:
            return f"[ANSWER] {abs(a * b + rng.choice((-10, 10)) * rng.randint(1, 40))}"
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        heard = _HEARD.format(role="tool", text=a * b)
        return f"<tool_call>{call}</tool_call>{heard}[ANSWER] {a * b}"

    return Recipe(name="calculator", worked=worked, chat=True, steps=220, batch_size=48)


def guesser() -> Recipe:
    """Guesses the middle of the numbers that are left. The habit: the lowest of them.

    For 25 among 20 to 26 that is "23", "25", and by habit alone "20", "21", "22".
    """

    def worked(example: Example, rng: random.Random) -> str:
        low, high = example.columns["low"], example.columns["high"]
        secret, said = int(example.expected_answer), []
        for _ in range((high - low + 1).bit_length()):
            guess = low if rng.random() < 0.56 else (low + high) // 2
            said.append(str(guess))
            if guess == secret:
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            said.append(_HEARD.format(role="user", text="higher" if guess < secret else "lower"))
        return "".join(said if said[-1].isdigit() else said[:-1])

    return Recipe(name="guesser", worked=worked, chat=True, steps=180, batch_size=48)
