"""Comparison of two LaTeX answers with math-verify, in a process that can be killed.

sympy can hang on a short answer such as 9^{9^{9^9}}, in native code that Python's signal handlers cannot interrupt. So
this file also runs as a separate program, which forks the process that compares. The kernel ends that process when its
CPU time is used up, and no comparison costs a new import. The program reads one line of JSON per comparison and prints "1"
or "0", and imports nothing from this package.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys

LONGEST_SECONDS = 4.0
"""Limit of one comparison, in seconds of CPU time: the same for each, whatever was compared before and however busy the
machine is. A right series or integral took up to 3.2 s. Twelve comparisons that hang take 48 s, within the 60 s of a reward function."""

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
    r"(?:\\quad|\s)*([a-z])\s*(<|>|\\leq?|\\geq?|[≤≥])(?![a-z])\s*([^<>≤≥]*?)(?:\\quad|\s)*"
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

_SURELY_READ = re.compile(
    r"""(?:[\d\s.,:;!|()\[\]{}+\-*/=<>^_&%$'] | (?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]) | \\text\w*\{[^{}]*\} | \\[\\{}%$!,;:\ ]
    | \\(?:[dtc]?frac|sqrt|pi|left|right|infty|cup|cap|cdot|times|pm|leq?|geq?|neq?|circ|sin|cos|tan|log|ln|in|mathbb)(?![a-zA-Z])
    | \\(?:begin|end)\{[pbv]matrix\})*""",
    re.VERBOSE,
)
"""Common LaTeX, which math-verify reads if its braces are balanced: it takes milliseconds for an answer, and a file has many."""


class MathJudge:
    """Compares answers in another process, which is started on first use."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._process: subprocess.Popen | None = None
        self._owner = 0
        # The reward and the judgement compare the same pairs.
        self.equal = functools.lru_cache(maxsize=4096)(self._equal)
        self.reads = functools.cache(
            self._reads
        )  # a file's answers are read again whenever a row is used

    def _reads(self, expected: str) -> bool:
        """Returns whether the expected answer is read, so that it can be written in another way than as it is."""
        if _decided(expected, expected) is not None:
            return True
        pairs = (("{", "}"), ("\\left", "\\right"))
        is_balanced = all(
            expected.count(opens) == expected.count(closes) for opens, closes in pairs
        )
        if is_balanced and _SURELY_READ.fullmatch(expected):
            return True
        return len(expected) <= _LONGEST_ANSWER and self._ask(*_without_units("", _latex(expected)))

    def _equal(self, answer: str, expected: str) -> bool:
        """Returns whether both are equal: numbers and dates by their own rules, all else if math-verify finds it in time."""
        from torchtitan_rl.data.answers import equal_texts

        decided = _decided(answer, expected)
        if decided is not None:
            return decided
        if equal_texts(answer, expected):
            return True
        if not answer or max(len(answer), len(expected)) > _LONGEST_ANSWER:
            return False
        pair = _without_units(_latex(answer), _latex(expected))
        decided = _decided(*pair) if pair else False
        return self._ask(*pair) if decided is None else decided

    def _ask(self, answer: str, expected: str) -> bool:
        """Returns the process's answer within the time limit: whether both are equal, or for no answer whether it reads one."""
        process = self._running()
        process.stdin.write(json.dumps([self._longest_seconds, answer, expected]) + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
        if not reply:
            process.wait()  # the program has ended: `_running` starts a new one
        return reply.strip() == "1"

    def _running(self) -> subprocess.Popen:
        """Returns this process's own comparison process: after a fork, the child must not share its parent's."""
        if self._owner != os.getpid() or self._process.poll() is not None:
            # -P: do not import modules of this folder in place of installed packages.
            command = [sys.executable, "-P", __file__]
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.DEVNULL,
            }
            self._process = subprocess.Popen(command, text=True, **pipes)
            self._process.stdout.readline()  # wait until it is ready, so that startup does not count as comparison time
            self._owner = os.getpid()
        return self._process


def _decided(answer: str, expected: str) -> bool | None:
    r"""Returns whether two numbers, perhaps with a base, or two dates are equal; None for all else.

    math-verify takes \frac{1}{2} for 0.5, but also 1.0000001 for 1.0000002 and 10110_3 for 10110_2, and cannot read 1.5e3.
    """
    from torchtitan_rl.data.answers import as_number

    left, right = as_number(answer), as_number(expected)
    if left is not None and right is not None:
        if ("%" in answer) == ("%" in expected):
            return left == right
        percent, other = (left, right) if "%" in answer else (right, left)
        return other in (percent, percent / 100)
    found = [_IN_BASE.fullmatch(text.strip()) for text in (answer, expected)]
    if all(found) and any(
        one[2] for one in found
    ):  # the question names the base if an answer does not
        bases = {_BASES.get(one[2], one[2]) for one in found if one[2]}
        return len(bases) == 1 and found[0][1].lstrip("0") == found[1][1].lstrip("0")
    if _DATE.fullmatch(expected.strip()):
        parts = [[int(part) for part in re.findall(r"\d+", text)] for text in (answer, expected)]
        return parts[0] == parts[1] and _DATE.fullmatch(answer.strip()) is not None
    return None


def _compare(answer: str, expected: str) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    normalized = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalized)]
    pair = _cases_apart([answer, expected])
    # math-verify's own limits are of the clock, which runs on while a busy machine does other things.
    said, right = (
        parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None) for text in pair
    )
    if not answer:
        return not all(isinstance(one, str) for one in right)
    if len({_SPACES.sub("", _TEXT.sub(r"\1", text)) for text in pair}) == 1:
        return True
    equal = bool(said and right) and verify(
        right, said, allow_set_relation_comp=True, timeout_seconds=None
    )
    return equal and not _are_tiny_and_differ(said[0], right[0])


def _without_units(*pair: str) -> list[str] | None:
    """Returns both texts without their units, and without a condition that only one has; None if their units differ."""
    if sum(bool(_CONDITION.search(text)) for text in pair) == 1:
        pair = tuple(_CONDITION.sub("", text) for text in pair)
    found = [_WITH_UNIT.fullmatch(text) for text in pair]
    units = {
        _LONGER.sub("", one["symbol"] or one["text"] or one["words"] or "") for one in found if one
    }
    units = {unit.lower() if unit in ("AM", "PM") else unit for unit in units}
    if len({unit for unit in units if re.fullmatch(rf"{_UNITS}|day|[ap]m", unit)}) > 1:
        return None
    return [
        one["number"] or one["any"] if one else text for one, text in zip(found, pair, strict=True)
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
    letters = [{found for found in _LETTERS.findall(text) if len(found) == 1} for text in pair]
    both = {one for own in letters for one in own if one.isupper() and one.lower() in own}
    names = dict(zip(sorted(both), sorted(set("abcknpquvwz").difference(*letters)), strict=False))
    return [_LETTERS.sub(lambda found: names.get(found[0], found[0]), text) for text in pair]


def _are_tiny_and_differ(left: object, right: object) -> bool:
    """Returns whether one of two numbers is nearly 0 and they differ: math-verify rounds, so that 2^{-98} is 2^{-99}."""
    from sympy import Expr

    if not all(isinstance(one, Expr) and one.is_number for one in (left, right)):
        return False
    left, right = left.doit(), right.doit()
    least = min(abs(one.evalf()) for one in (left, right))
    return 0 < least < _TINY and abs((left / right).evalf() - 1) > _TINY


def _main() -> None:
    """Forks the process that compares, and a new one when the kernel has ended it, until stdin is closed."""
    _compare(
        r"\frac{1}{2} + \sqrt{x}", r"0.5 + x^{1/2}"
    )  # what the first comparison imports and makes, all forks have
    print("ready", flush=True)
    status = signal.SIGPROF
    while status == signal.SIGPROF:
        pid = os.fork()
        if pid == 0:
            _serve()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == signal.SIGPROF:
            print(0, flush=True)


def _serve() -> None:
    """Compares the pairs from stdin. A comparison that uses up its CPU time ends the process, by SIGPROF."""
    from sympy.core import random

    for request in sys.stdin:
        seconds, *pair = json.loads(request)
        random.seed(0)  # sympy tries random numbers
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            equal = _compare(*pair)
        except Exception:  # sympy's, for an expression that it cannot evaluate
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(equal), flush=True)


if __name__ == "__main__":
    _main()
