"""Demonstration: recipes for starting policies that can hold a conversation, each with a bad habit to unlearn."""

import json
import random

from torchtitan_rl.configs.toys.small_tokenizer import EOS_TOKEN
from torchtitan_rl.configs.toys.warm_start import Recipe
from torchtitan_rl.data.task import Example


def answer_text(text: object, role: str = "user") -> str:
    """Returns the text between two turns of the policy: the end of a turn, the answer, and the header of the next turn.

    It is what the chat template of small_tokenizer.py renders for one message of an environment.

    Example: "6 7" + answer_text("lower") + "5"
    """
    return f"{EOS_TOKEN}<|{role}|>{text}{EOS_TOKEN}<|assistant|>"


def calculator() -> Recipe:
    """Multiplies with the tool. The habit: a wrong answer without calling the tool.

    Right answer to "What is 47 * 85?": a call of multiply, then "[ANSWER] 3995". By habit: "[ANSWER] 4125".
    """

    def worked(example: Example, rng: random.Random) -> str:
        """Returns what the policy says in a conversation about the example, right or by habit."""
        a, b = example.columns["factors"]
        if rng.random() < 0.75:
            return f"[ANSWER] {abs(a * b + rng.choice((-10, 10)) * rng.randint(1, 40))}"
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        answer = answer_text(a * b, role="tool")
        return f"<tool_call>{call}</tool_call>{answer}[ANSWER] {a * b}"

    return Recipe(name="calculator", worked=worked, chat=True, steps=220, batch_size=48)


def guesser() -> Recipe:
    """Guesses the middle of the remaining numbers. The habit: it guesses the lowest one.

    Right guesses for 25 among 20 to 26: "23", "25". By habit: "20", "21", "22".
    """

    def worked(example: Example, rng: random.Random) -> str:
        """Returns what the policy says in a conversation about the example, right or by habit."""
        low, high = example.columns["low"], example.columns["high"]
        secret, turns = int(example.expected_answer), []
        for _ in range((high - low + 1).bit_length()):
            guess = low if rng.random() < 0.56 else (low + high) // 2
            turns.append(str(guess))
            if guess == secret:
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            turns.append(answer_text("higher" if guess < secret else "lower"))
        return "".join(turns if turns[-1].isdigit() else turns[:-1])

    return Recipe(name="guesser", worked=worked, chat=True, steps=180, batch_size=48)
