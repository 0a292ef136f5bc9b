"""How an answer is read off a completion and compared with the expected one."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")


class AnswerKind(NamedTuple):
    """One kind of answers."""

    extract: Callable[[str], str | None]
    """The answer that a text gives; None when it gives none."""
    equal: Callable[[str, str], bool]
    """Whether two answers are the same."""


def last_number(text: str) -> str | None:
    """The last number of a text. Example: last_number("so 3 x 400 = 1,200.") == "1,200"."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, inner braces and all. Example: last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def last_tagged(text: str) -> str | None:
    """What the last <answer>...</answer> holds. Example: last_tagged("<answer> 4 </answer>") == "4"."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def as_number(text: str) -> Fraction | None:
    """The number that a text is, "$" and "%" aside; None for any other text. Example: as_number("$1,200.50")."""
    try:
        return Fraction(text.strip().strip("$%").rstrip(".").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def equal_numbers(answer: str, expected: str) -> bool:
    """Whether both are numbers of one value: "1,200.0" and "1200" are. The time grows with no exponent: 1e999999 is no number."""
    if max(len(answer), len(expected)) > 100 or "e" in (answer + expected).lower():
        return False
    left, right = as_number(answer), as_number(expected)
    return left is not None and left == right


def equal_texts(answer: str, expected: str) -> bool:
    """Whether both are the same text but for white space around it."""
    return answer.strip() == expected.strip()


KINDS = {
    "text": AnswerKind(str.strip, equal_texts),
    "tag": AnswerKind(last_tagged, equal_texts),
    "number": AnswerKind(last_number, equal_numbers),
}
"""By the name that configs use."""
