"""Comparison of two LaTeX answers with math-verify."""

import functools
import gc
import logging
import os
import re
import signal

from torchtitan_rl.data.answers import as_number, equal_texts

LONGEST_SECONDS = 4.0
"""Limit of one comparison, in seconds of CPU time. Most take milliseconds; a series or an integral takes seconds."""

_LONGEST_ANSWER = 1000
"""Maximum characters of an answer. A longer one counts as wrong."""

_UNIT = r"(?:[kcmdn]?m|[kmn]?g|m?[lL]|[kM]?(?:W|J|N|V|Hz|Pa)|mi|ft|in|yd|h|hr|s|sec|min|USD|EUR|GBP|INR)"
_POWER = r"(?:\s?\^\s?\{?-?[1-3]\}?)"
_UNITS = rf"{_UNIT}{_POWER}?(?:\s?/\s?{_UNIT}{_POWER}?)?"
_WITH_UNIT = re.compile(
    rf"""(?:(?P<number>(?:[^=]*=)?(?:[^a-zA-Z\\]|\\(?!text|math|mbox)[a-zA-Z]+|\\[^a-zA-Z])*[\d}}])
    (?:(?!\ (?:and|or|to)\ )(?P<words>(?:\ [a-z]{{2,}})+)|\s?(?P<symbol>{_UNITS})))
    |(?P<any>(?:(?!\\text|\\mathrm|\\mbox).)*?[^\s,;\\])
    (?:(?:\s|\\[,;:\ ]|\\cdot)*\\(?:text|mathrm|mbox)\{{(?P<text>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}{_POWER}?)+""",
    re.VERBOSE | re.DOTALL,
)
"""A number or a constant with words or a unit after it, or anything with \\text{} after it. math-verify's own rule takes
the h of \\pi r^2 h for hours."""
_LONGER = re.compile(
    rf"[\s.]|{_POWER}|(?<=h)(?:ou)?rs?|(?<=s)ec(?:ond)?s?|(?<=min)(?:ute)?s?|(?<=day)s|(?<=mi)les?"
)
"""Parts of units that some leave out. Without them, hours are h, and a.m. is am."""
_HALF_LINE = re.compile(
    r"(?:\\quad|\s)*([a-z])\s*(<|>|\\leq?|\\geq?|[≤≥])(?![a-z])\s*+([^<>≤≥]*?)(?:\\quad|\s)*"
)
_SIGNS = str.maketrans({"∞": r"\infty ", "∅": r"\emptyset ", "·": r"\cdot ", "²": "^2", "³": "^3"})
_LETTERS = re.compile(
    r"\\(?:math|text|operatorname)[a-z]*\s?\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]{3,}|[a-zA-Z]"
)
"""Commands, words and variables."""
_SPACES = re.compile(r"(?<![\d,])\s|\s(?!\d)|\\[,;:! ]|\\(?:left|right)(?![a-z])")
_TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf)|mbox)\{([^{}]*)\}")
_ROOT = re.compile(r"√\s?(?:\(([^()]*)\)|(\d+|[a-zA-Z]))")

_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_BASES = {word: str(base) for base, word in enumerate(_WORDS, start=2)}
_IN_BASE = re.compile(
    rf"([\dA-Z]*\d[\dA-Z]*)(?:_\{{?(?:\\text\{{)?(\d+|{'|'.join(_BASES)})\}}{{0,2}})?"
)
"""A number and its base, as 10110_2, which math-verify leaves out."""
_DATE = re.compile(r"\d{4}([-/.])\d\d?\1\d\d?|\d\d?([-/.])\d\d?\2\d{4}")
"""A date, which math-verify takes for a difference or a quotient."""
_CONDITION = re.compile(r"\s*\\text\{\s*(?:for|where|with|such that)\b[^&]*$")
_UPRIGHT = re.compile(r"\\mathrm\{([ei])\}")
"""A constant that math-verify does not read."""

_TINY = 1e-5

_USUAL = (
    (r"\frac{1}{2} + \sqrt{x}", r"0.5 + x^{1/2}"),
    (r"(x+1)^2", r"x^2 + 2x + 1"),
    (r"[2,\infty) \cup \{-1\}", r"(-\infty, 3)"),
    (r"\sin \pi y", r"\log_2 n!"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"(1, 2, 3)"),
)
"""Pairs that `_warm_up` compares."""

_SURELY_READ = re.compile(
    r"""(?:[\d\s.,:;!|()\[\]{}+\-*/=<>^_&%$'] | (?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]) | \\text\w*\{[^{}]*\} | \\[\\{}%$!,;:\ ]
    | \\(?:[dtc]?frac|sqrt|pi|left|right|infty|cup|cap|cdot|times|pm|leq?|geq?|neq?|circ|sin|cos|tan|log|ln|in|mathbb)(?![a-zA-Z])
    | \\(?:begin|end)\{[pbv]matrix\})*""",
    re.VERBOSE,
)
"""Common LaTeX, which math-verify reads if its braces are balanced: it takes milliseconds for an answer, and a file has many."""


@functools.cache  # a file's answers are read again whenever a row is used
def is_math(expected: str) -> bool:
    """Returns whether the expected answer is read, so that it can be written in another way than as it is."""
    if _decided(expected, expected) is not None:
        return True
    pairs = (("{", "}"), ("\\left", "\\right"))
    is_balanced = all(expected.count(opens) == expected.count(closes) for opens, closes in pairs)
    if is_balanced and _SURELY_READ.fullmatch(expected):
        return True
    return len(expected) <= _LONGEST_ANSWER and _in_time(*_without_units("", _latex(expected)))


@functools.lru_cache(maxsize=4096)  # the reward and the judgement compare the same pairs
def equal_math(answer: str, expected: str) -> bool:
    """Returns whether both are equal: numbers and dates by their own rules, all else if math-verify finds it in time."""
    if equal_texts(answer, expected):
        return True
    if not answer or max(len(answer), len(expected)) > _LONGEST_ANSWER:
        return False
    decided = _decided(answer, expected)
    if decided is not None:
        return decided
    pair = _without_units(_latex(answer), _latex(expected))
    decided = _decided(*pair) if pair else False
    return _in_time(*pair) if decided is None else decided


def _in_time(answer: str, expected: str) -> bool:
    """Returns what `_compare` does; False if it needs more than LONGEST_SECONDS.

    It runs in a fork of this process, which the kernel ends: sympy can hang on a short answer such as 9^{9^{9^9}}, in native code
    that no Python signal handler interrupts. All comparisons start from the same state, so none is slower or faster for earlier ones.
    """
    _warm_up()
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            gc.freeze()  # leave the garbage of the process that was forked
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
            status = int(_compare(answer, expected))
        finally:  # also after an error of sympy, for an expression that it cannot evaluate
            os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(wait_status) == 1


@functools.cache
def _warm_up() -> None:
    """Import math-verify and compare expressions of usual kinds, so that no comparison has to make its parser's tables again."""
    # It warns that it has no limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for answer, expected in _USUAL:
        _compare(answer, expected)


def _decided(answer: str, expected: str) -> bool | None:
    r"""Returns whether two numbers, perhaps with a base, or two dates are equal; None for all else.

    math-verify takes \frac{1}{2} for 0.5, but also 1.0000001 for 1.0000002 and 10110_3 for 10110_2, and cannot read 1.5e3.
    """
    left, right = as_number(answer), as_number(expected)
    if left is not None and right is not None:
        if ("%" in answer) == ("%" in expected):
            return left == right
        percent, other = (left, right) if "%" in answer else (right, left)
        return other in (percent, percent / 100)
    in_base = [_IN_BASE.fullmatch(text.strip()) for text in (answer, expected)]
    if all(in_base) and any(number[2] for number in in_base):
        # The question names the base if an answer does not.
        bases = {_BASES.get(number[2], number[2]) for number in in_base if number[2]}
        return len(bases) == 1 and in_base[0][1].lstrip("0") == in_base[1][1].lstrip("0")
    if _DATE.fullmatch(expected.strip()):
        parts = [[int(part) for part in re.findall(r"\d+", text)] for text in (answer, expected)]
        return parts[0] == parts[1] and _DATE.fullmatch(answer.strip()) is not None
    return None


def _compare(answer: str, expected: str) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core import random

    random.seed(0)  # sympy tries random numbers

    normalized = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalized)]
    pair = _cases_apart([answer, expected])
    # math-verify's own limits are of the clock, which runs on while a busy machine does other things.
    read = functools.partial(parse, extraction_config=config, parsing_timeout=None)
    left, right = (read(f"\\boxed{{{text}}}") for text in pair)
    if not answer:
        return not all(isinstance(reading, str) for reading in right)
    if len({_SPACES.sub("", _TEXT.sub(r"\1", text)) for text in pair}) == 1:
        return True
    if not (left and right):
        return False
    equal = verify(right, left, allow_set_relation_comp=True, timeout_seconds=None)
    return equal and not _are_tiny_and_differ(left[0], right[0])


def _without_units(*pair: str) -> list[str] | None:
    """Returns both texts without their units, and without a condition that only one has; None if their units differ."""
    if sum(bool(_CONDITION.search(text)) for text in pair) == 1:
        pair = tuple(_CONDITION.sub("", text) for text in pair)
    matches = [_WITH_UNIT.fullmatch(text) for text in pair]
    units = {
        _LONGER.sub("", match["symbol"] or match["text"] or match["words"] or "")
        for match in matches
        if match
    }
    units = {unit.lower() if unit in ("AM", "PM") else unit for unit in units}
    if len({unit for unit in units if re.fullmatch(rf"{_UNITS}|day|[ap]m", unit)}) > 1:
        return None
    return [
        match["number"] or match["any"] if match else text
        for match, text in zip(matches, pair, strict=True)
    ]


def _latex(text: str) -> str:
    """Returns the text with LaTeX that math-verify reads in place of what it does not read: "x<2 or x>3" is a union."""
    text = _UPRIGHT.sub(r"\1", text.replace(r"\varnothing", "∅").translate(_SIGNS))
    text = re.sub(r"^\\text\{(\d[^{}]*)\}$", r"\1", text)
    if re.fullmatch(r"[^:,]+(?::[^:,]+){2,}", text):  # math-verify divides: 1:3:2 would be 1:2:3
        return f"({text.replace(':', ',')})"
    parts = re.split(r"\\text\{\s*or\s*\}|\bor\b", text)
    rays = [_HALF_LINE.fullmatch(part) for part in parts]
    if len(parts) > 1 and all(rays) and len({ray[1] for ray in rays}) == 1:
        return r"\cup".join(_interval(ray[2], ray[3]) for ray in rays)
    return _ROOT.sub(r"\\sqrt{\1\2}", text).removeprefix(r"\approx").rstrip("\\ ")


def _interval(sign: str, bound: str) -> str:
    """Returns the numbers on one side of the bound. Example: _interval("<", "2") == "(-\\infty,2)"."""
    is_open = sign in "<>"
    if sign in ("<", r"\le", r"\leq", "≤"):
        return rf"(-\infty,{bound}{')' if is_open else ']'}"
    return rf"{'(' if is_open else '['}{bound},\infty)"


def _cases_apart(pair: list[str]) -> list[str]:
    """Returns both texts with another letter for R where one has R and r, which math-verify takes for the same."""
    letters = [{name for name in _LETTERS.findall(text) if len(name) == 1} for text in pair]
    both = {name for own in letters for name in own if name.isupper() and name.lower() in own}
    names = dict(zip(sorted(both), sorted(set("abcknpquvwz").difference(*letters)), strict=False))
    return [_LETTERS.sub(lambda match: names.get(match[0], match[0]), text) for text in pair]


def _are_tiny_and_differ(left: object, right: object) -> bool:
    """Returns whether one of two numbers is nearly 0 and they differ: math-verify rounds, so that 2^{-98} is 2^{-99}."""
    from sympy import Expr

    if not all(isinstance(number, Expr) and number.is_number for number in (left, right)):
        return False
    left, right = left.doit(), right.doit()
    least = min(abs(number.evalf()) for number in (left, right))
    return 0 < least < _TINY and abs((left / right).evalf() - 1) > _TINY
