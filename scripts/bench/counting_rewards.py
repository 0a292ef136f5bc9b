"""The rewards of the task Counting, for TRL's environment, which has no torchtitan_rl. A test compares them with the task's."""

import re

TAG = "[ANSWER]"
ANSWER = re.compile(re.escape(TAG) + r"\s*([+-]?[0-9]{1,18})(?![.,]?[0-9])")


def is_right(text: str, expected: str) -> bool:
    """Whether the integer after the last tag is the expected one."""
    answer = ANSWER.match(text, text.rfind(TAG)) if TAG in text else None
    return answer is not None and int(answer[1]) == int(expected)


def correct(completions: list[str], expected_answer: list[str], **_) -> list[float]:
    """+1 for the right answer, -1 for a wrong one or none."""
    return [1.0 if is_right(*each) else -1.0 for each in zip(completions, expected_answer, strict=True)]


def well_formed(completions: list[str], **_) -> list[float]:
    """0.2 for exactly one tag with an integer after it, else 0."""
    return [0.2 if text.count(TAG) == 1 and ANSWER.search(text) else 0.0 for text in completions]
