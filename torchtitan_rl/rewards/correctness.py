"""Rewards for a right answer, compared as text, number or mathematical expression: 1 for right, 0 for wrong.

The reward is None if the expected answer is empty, for `numeric` no number, or for `math_answer` nothing that math-verify reads.
"""

from collections.abc import Sequence

from torchtitan_rl.data.answers import OR, equal_numbers, equal_words, final_answer, last_number
from torchtitan_rl.data.math_answers import equal_math, is_math
from torchtitan_rl.data.task import completion_text


def exact_match(completions, expected_answer, **_):
    """1 if the answer equals the expected text, ignoring case and white space; for a choice E, "E: its text" too."""
    return _scores(completions, expected_answer, equal_words, bool)


def numeric(completions, expected_answer, **_):
    """1 if the last number in the answer equals the expected number: 1,000 is 1000, 1/2 is 0.5 and 2.50 is 2.5."""
    equal = _equal_last_numbers
    return _scores(completions, expected_answer, equal, lambda text: equal(text, text))


def math_answer(completions, expected_answer, **_):
    """1 if math-verify finds the LaTeX or expression equal to the expected answer.

    A comparison is killed after 4 s of CPU time, and counts as wrong.
    """
    return _scores(completions, expected_answer, equal_math, lambda text: text and is_math(text))


def _scores(completions: Sequence, expected_answer: Sequence[str], equal, reads) -> list:
    """Returns 1 where the final answer is equal to an accepted one, else 0; None where `reads` none of these."""
    scores = []
    for completion, expected in zip(completions, expected_answer, strict=True):
        answer = final_answer(completion_text(completion))
        alternatives = [text.strip() for text in expected.split(OR)]
        accepted = [text for text in alternatives if reads(text)]
        scores.append(float(any(equal(answer, text) for text in accepted)) if accepted else None)
    return scores


def _equal_last_numbers(answer: str, expected: str) -> bool:
    return equal_numbers(last_number(answer) or "", last_number(expected) or "")
