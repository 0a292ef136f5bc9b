"""Whether the answer is right: as text, as a number, as mathematics. 1 for right, 0 for wrong, None for nothing to judge by."""

import functools
import re
from fractions import Fraction

from torchtitan_rl.library.answers import as_number, last_boxed, last_number, last_tagged
from torchtitan_rl.library.math_answers import MathJudge
from torchtitan_rl.library.task import completion_text

_MARKS = (re.compile(r"####[ \t]*(.+)"), re.compile(r"answer(?: is|:)[ \t]*(.+)", re.IGNORECASE))

_math_judge = functools.cache(MathJudge)
"""One process for all that this one compares."""


def final_answer(text: str) -> str:
    """What a text gives as its answer: the last \\boxed{...}; else the last <answer>, "#### x" or "answer is x"; else its last line.

    Example: final_answer("so the answer is 12.") == "12"
    """
    for inside in (last_boxed(text), last_tagged(text)):
        if inside is not None:
            return inside.strip()
    for mark in _MARKS:
        if found := mark.findall(text):
            return found[-1].strip().rstrip(".")
    return (text.strip().splitlines() or [""])[-1].strip()


def exact_match(completions, expected_answer, **_):
    """The answer's text is the expected one, but for upper and lower case and for spaces."""
    return [
        float(_plain(final_answer(completion_text(completion))) == _plain(expected))
        for completion, expected in zip(completions, expected_answer, strict=True)
    ]


def numeric(completions, expected_answer, **_):
    """The last number of the answer is the expected one: 1,000 is 1000, 1/2 is 0.5 and 2.50 is 2.5."""
    return [
        None
        if (wanted := number(expected)) is None
        else float(number(final_answer(completion_text(completion))) == wanted)
        for completion, expected in zip(completions, expected_answer, strict=True)
    ]


def number(text: str) -> Fraction | None:
    """The last number in a text, exactly. Example: number("from 3 to 1,250.5") == Fraction(2501, 2)"""
    return as_number(last_number(text) or "")


def math_answer(completions, expected_answer, **_):
    """The answer is mathematically the expected one, by math-verify, in a process that is killed after 10 s: LaTeX, expressions."""
    judge = _math_judge()
    return [
        float(judge.equal(final_answer(completion_text(completion)), expected))
        for completion, expected in zip(completions, expected_answer, strict=True)
    ]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
