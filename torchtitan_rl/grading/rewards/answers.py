"""Whether the answer is right: as text, as a number, as mathematics. 1 for right, 0 for wrong, None for nothing to judge by."""

import re
from fractions import Fraction

from torchtitan_rl.tasks import completion_text

_MARKS = (
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"####[ \t]*(.+)"),
    re.compile(r"answer(?: is|:)[ \t]*(.+)", re.IGNORECASE),
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}|\s*/\s*\d+)?")


def final_answer(text: str) -> str:
    """What a text gives as its answer: the last \\boxed{...}; else the last <answer>, "#### x" or "answer is x"; else its last line.

    Example: final_answer("so the answer is 12.") == "12"
    """
    if (inside := last_boxed(text)) is not None:
        return inside.strip()
    for mark in _MARKS:
        if found := mark.findall(text):
            return found[-1].strip().rstrip(".")
    return (text.strip().splitlines() or [""])[-1].strip()


def last_boxed(text: str) -> str | None:
    """What is inside of the last \\boxed{...}, whose braces must close. Example: last_boxed(r"\\boxed{\\frac{1}{2}}")"""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth = 0
    for place in range(begin + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len("\\boxed{") : place]
    return None


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
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", found[-1]))
    except ZeroDivisionError:
        return None


def math_answer(completions, expected_answer, **_):
    """The answer is mathematically the expected one, by math-verify: LaTeX and expressions. None where that cannot be read.

    Its own time limits are off, as they are made of the process's only alarm: grader.time_limit_seconds is the limit, and
    with grader.workers it ends whatever it computes.
    """
    import math_verify

    def parsed(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None)

    scores = []
    for completion, expected in zip(completions, expected_answer, strict=True):
        text = completion_text(completion)
        gold = parsed(expected) or parsed(f"${expected}$")
        given = parsed(text) or parsed(f"${final_answer(text)}$")
        scores.append(float(math_verify.verify(gold, given, timeout_seconds=None)) if gold else None)
    return scores


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
