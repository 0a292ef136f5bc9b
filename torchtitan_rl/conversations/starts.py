"""Recipes of starting policies that can hold a conversation, each with a habit to unlearn; see tasks/warm_start.py."""

import json
import random

from torchtitan_rl.tasks.small_tokenizer import EOS_TOKEN
from torchtitan_rl.tasks.task import Example
from torchtitan_rl.tasks.warm_start import Recipe

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
    """Guesses within what is still possible. The habit: the next guess is close to the last one.

    For a number from 20 to 26 that is 25, by habit "21", "22", "23"; otherwise any number left, such as "24", "26", "25".
    """

    def worked(example: Example, rng: random.Random) -> str:
        low, high = example.columns["low"], example.columns["high"]
        secret, said = int(example.expected_answer), []
        for _ in range((high - low + 1).bit_length()):
            guess = rng.randint(low, high)
            if rng.random() < 0.5:
                guess = min(low + rng.randint(0, 2), high) if rng.random() < 0.5 else max(high - rng.randint(0, 2), low)
            said.append(str(guess))
            if guess == secret:
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            said.append(_HEARD.format(role="user", text="higher" if guess < secret else "lower"))
        return "".join(said if said[-1].isdigit() else said[:-1])

    return Recipe(name="guesser", worked=worked, chat=True, steps=180, batch_size=48)
