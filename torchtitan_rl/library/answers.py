"""Functions that extract an answer from a completion and compare it with the expected answer."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

_WITH_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d*)?(/\d+)?")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")


class AnswerKind(NamedTuple):
    """How one kind of answer is extracted and compared."""

    extract: Callable[[str], str | None]
    """Returns the answer in a text, or None if there is none."""
    equal: Callable[[str, str], bool]
    """Returns whether two answers are equal."""


def last_number(text: str) -> str | None:
    """Returns the last number in a text. Example: last_number("so 3 x 400 = 1,200.") == "1,200"."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}. Example: last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def last_tagged(text: str) -> str | None:
    """Returns the content of the last <answer>...</answer>. Example: last_tagged("<answer> 4 </answer>") == "4"."""
    content, position = None, 0
    while (begin := text.find("<answer>", position)) >= 0:
        end = text.find("</answer>", begin)
        if end < 0:  # no later one is closed either; a regular expression would look for the end of each
            break
        content, position = text[begin + len("<answer>") : end], end + len("</answer>")
    return None if content is None else content.strip()


def as_number(text: str) -> Fraction | None:
    """Parses a number, ignoring "$" and "%"; None for other text. A comma separates thousands alone.

    Example: as_number("$1,200.50") == Fraction("1200.5"), and as_number("24,5") is None.
    """
    plain = text.strip().strip("$%").rstrip(".")
    if "," in plain and not _WITH_THOUSANDS.fullmatch(plain):
        return None
    try:
        return Fraction(plain.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def equal_numbers(answer: str, expected: str) -> bool:
    """Returns whether both are numbers of equal value, such as "1,200.0" and "1200".

    Exponents are not accepted, because 1e999999 would take very long to expand.
    """
    if max(len(answer), len(expected)) > 100 or "e" in (answer + expected).lower():
        return False
    left, right = as_number(answer), as_number(expected)
    return left is not None and left == right


def equal_texts(answer: str, expected: str) -> bool:
    """Returns whether both texts are equal, ignoring surrounding white space."""
    return answer.strip() == expected.strip()


KINDS = {
    "text": AnswerKind(str.strip, equal_texts),
    "tag": AnswerKind(last_tagged, equal_texts),
    "number": AnswerKind(last_number, equal_numbers),
}
"""Answer kinds by the name used in configs."""
