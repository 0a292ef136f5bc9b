"""Rewards for a right answer, compared as text, number or mathematical expression: 1 for right, 0 for wrong.

The reward is None if the expected answer is empty, for `numeric` no number, or for `math_answer` nothing that math-verify reads.
"""

import functools
from collections.abc import Sequence

from torchtitan_rl.library.answers import as_number, equal_texts, final_answer, last_number
from torchtitan_rl.library.math_answers import MathJudge
from torchtitan_rl.library.task import completion_text

_math_judge = functools.cache(MathJudge)
"""Returns the one comparison process that all calls in this process share."""


def exact_match(completions, expected_answer, **_):
    """1 if the answer equals the expected text, ignoring case and white space; for a choice E, "E: its text" too."""
    pairs = _answers(completions, expected_answer)
    return [float(equal_texts(_plain(answer), _plain(expected))) if expected else None for answer, expected in pairs]


def numeric(completions, expected_answer, **_):
    """1 if the last number in the answer equals the expected number: 1,000 is 1000, 1/2 is 0.5 and 2.50 is 2.5."""
    pairs = [
        tuple(as_number(last_number(text) or "") for text in pair) for pair in _answers(completions, expected_answer)
    ]
    return [None if wanted is None else float(found == wanted) for found, wanted in pairs]


def math_answer(completions, expected_answer, **_):
    """1 if math-verify finds the LaTeX or expression equal to the expected answer.

    A comparison is killed after 10 s; if several hang, after less (see MathJudge).
    """
    judge = _math_judge()
    pairs = _answers(completions, expected_answer)
    return [
        float(judge.equal(answer, expected)) if expected and judge.reads(expected) else None
        for answer, expected in pairs
    ]


def _answers(completions: Sequence, expected_answer: Sequence[str]) -> list[tuple[str, str]]:
    """(final answer, expected one without surrounding spaces) of each completion."""
    answers = [final_answer(completion_text(completion)) for completion in completions]
    return [(answer, expected.strip()) for answer, expected in zip(answers, expected_answer, strict=True)]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
