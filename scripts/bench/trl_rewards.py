"""The rewards of two tasks, for TRL's environment, which has no torchtitan_rl. A test compares them with the tasks'."""

import re
from collections.abc import Callable

TAG = "[ANSWER]"
TAGGED = re.compile(re.escape(TAG) + r"\s*([+-]?[0-9]{1,18})(?![.,]?[0-9])")
INTEGER = re.compile(r"(?<!\w)[+-]?[0-9]+")


def tagged_integer(text: str) -> int | None:
    """The integer after the last tag."""
    answer = TAGGED.match(text, text.rfind(TAG)) if TAG in text else None
    return int(answer[1]) if answer else None


def last_integer(text: str) -> int | None:
    found = INTEGER.findall(text)
    return int(found[-1]) if found else None


EXTRACT = {"Counting": tagged_integer, "PlainSums": last_integer}
"""The answer in a completion of each task."""


def correct(task: str) -> Callable[..., list[float]]:
    """Returns the reward: +1 for the right answer, -1 for a wrong one or none."""

    def reward(completions: list[str], expected_answer: list[str], **_) -> list[float]:
        pairs = zip(completions, expected_answer, strict=True)
        return [1.0 if EXTRACT[task](text) == int(expected) else -1.0 for text, expected in pairs]

    return reward


def well_formed(completions: list[str], **_) -> list[float]:
    """0.2 for exactly one tag with an integer after it, else 0."""
    return [0.2 if text.count(TAG) == 1 and TAGGED.search(text) else 0.0 for text in completions]
