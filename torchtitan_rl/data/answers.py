"""Functions that extract an answer from a completion and compare it with the expected answer.

They read what follows the thinking (</think>), where there is some.
"""

import functools
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from torchtitan_rl.data.tool_calls import without_thinking

OR = "\nor\n"
"""Between the accepted answers of a row that has several."""
_LONGEST_NUMBER = 100
_LONGEST_FORMULA = 300
_MOST_SIGNS = 5
"""Limits of what is searched, as a policy may repeat \\( a thousand times."""
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SCALES |= {"lakh": 10**5, "crore": 10**7}
_MONEY_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
"""By the first letter of what may follow an amount of money: $5k, $5M, $5bn."""
_PLAIN_FORMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\u2212\u2013\uff0d]", "-"),
        (r"\\!|\\(?=[$%])", ""),
        (r"(?:\^\s*\{?\\circ\}?|\u00b0)(?:\s?(?:\\text\{|\\mathrm\{)?\s?[CF]\b\}?)?", ""),
        (r"(?<=\d)\{,\}(?=\d)|(?<=\d)(?:\\[, ;]|[\u00a0\u2009\u202f'\u2019_])(?=\d{3})", ","),
        (
            "[\u00bc-\u00be\u2150-\u215e]",
            lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/"),
        ),
        (
            r"\\[dtc]?frac\s?(?:\{\s?([-+]?\d{1,99})\s?\}|(\d))\s?(?:\{\s?(\d{1,99})\s?\}|(\d))",
            r" \1\2/\3\4",
        ),
        (r"-\s+(?=\d{1,99}/)", "-"),
        (rf"(?<=\d)\s?\\text\{{\s*({'|'.join(_SCALES)})s?\s*\}}", r" \1"),
        (
            "[\u00b2\u00b3\u00b9\u2070-\u2079\u207b]+",
            lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}".replace("\u2212", "-"),
        ),
        (r"(?<=\d)\s?(?:\u00d7|\\times|\\cdot|\*|x)\s?10\s?\^\s?\{?([-+]?\d{1,3})\}?", r"e\1"),
        (r"(?<![\w.^{])10\s?\^\s?\{?([-+]?\d{1,3})\}?", r"1e\1"),
        (
            r"(?<=\d)\s?[\u4e07\u4ebf]",
            lambda found: "e4 " if found[0].endswith("\u4e07") else "e8 ",
        ),
    )
)
"""Other ways to write a number, and how _NUMBER expects it."""

_LETTER = r"[^\W\d_\u0e00-\u0eff\u2e80-\ud7ff]"
"""A letter of a script with spaces between words. Chinese has none, and a number follows a word directly."""
_INTEGER = (
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d{1,3}(?:\ \d{3})+(?!\d)|\d+)"
)
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\d_)}}\]])(?<!{_LETTER})[-+])? (?P<money>(?:US)?\$|[€£¥₹])? (?P<inner>[-+])?
    (?: (?:(?P<whole>\d+)\ +(?:and\ +)?)? (?P<top>{_INTEGER})\ ?/\ ?(?P<bottom>\d+)
      | (?P<decimal>{_INTEGER}(?:\.\d*)?|(?<!\d)\.\d+) (?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))? )
    (?(money)(?:(?P<letter>(?i:[kmbt]|\ ?[mbt]n))(?![\w$-]))?)
    (?P<scale>(?:\ +(?i:{"|".join(_SCALES)})s?\b)*)""",
    re.VERBOSE,
)
_IN_TEXT = re.compile(
    rf"""(?P<no>(?:\bnot|n't|\bneither|\bnor)\s+\S*\d\S*)
    | (?:{_LETTER}|[)\]}}])[-+][.\d][^\s=]*  # x-5
    | \\(?:sqrt|[dtc]?frac|log)[^\s=]* | √[^\s=]*
    | (?<![\d_^])(?<!{_LETTER})(?<![_^]\{{)(?<!\d\.)(?:{_NUMBER.pattern}) (?P<rest> (?:[-/:,.+*_][$]?\d|[eE][-+]?\d|/(?![a-z]{{3}})|\^|\s?\\(?:sqrt|pi|cdot|times|[dtc]?frac)\s?|[√π]
      |(?:[kKMBxyz]|mn|bn|tn)(?!\w)|(?:\ [+*\u00d7]\ [$]?[\d.,]+)+|(?:\W|\\text){{1,4}}(?:or|to|and)\W{{1,4}}(?:maybe\W)?\d|\s+(?:ten|hundred|thousand|million)ths?\b)[^\s=]* )?""",
    re.VERBOSE,
)
"""A number in a text, or a longer expression, such as the range 15-20, 5k or \\sqrt{2}, whose parts are no answer; nor is "not 5" one."""

BOX = re.compile(r"\\f?boxed\s*(?=\{)|\\fbox\s*(?=\{)|\\boxed\s+(?=[^\s{])")
_FORMULA_END = re.compile(r"[$\n]|\\[\])]|\Z")
_MARK = re.compile(
    r"""(?: \#{4}
      | (?:answer|antwort|r\u00e9ponse|respuesta|(?:option|choice)(?=\W+(?:is\W+)?(?-i:[A-J])\b)
        |(?:statement|claim|argument|sentence)(?=\s+is\W+(?:true|false|valid|invalid)\b)) \**(?:\s+(?:is|ist|est|es|(?:must|would|should)\ be)\b|\s*[:\uff1a])
      | \u7b54\u6848\**[\u662f\u4e3a:\uff1a] | \u9009(?=[A-J]) | (?:option|choice)(?=\W+(?-i:[A-J])\W+is\s)
      | \b(?:I(?:\ would|\ will|'d|'ll)?|let's)\ (?:choose|pick|select|go\ with)(?=\W+(?:option\W+)?(?-i:[A-J])\b)
    )[\s:*\uff1a]*""",
    re.IGNORECASE | re.VERBOSE,
)
_RETRACTED = re.compile(
    r"[.!?]\s+(?:\w+\W+){0,2}wait\b|\bscratch that\b|\bmistake\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\b[MSDJ][a-z])(?<!\b[A-Z]\.\s[A-Z])\.\s(?![A-Z]\.)|[\n\u3002]")
"""Not the points of Mt. Everest or J. R. R. Tolkien."""
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$]|\\[()]|\\quad)*(?:[,;]|and|or|\\text\{ *(?:and|or) *\})(?:[\s$]|\\[()]|\\quad)*"
)
_LETTER_LINE = re.compile(
    r"answer\**(?:\s+is|\s*:)[\s:*($]*((?-i:[A-J]))[).*$]*\s*$", re.IGNORECASE | re.MULTILINE
)
_WRAPPED = re.compile(
    r"(`+)([^`]+)\1|(\$+)([^$]+)\3|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|f?boxed)\{([^{}]+)\}|[\"\u201c]([^\"\u201c\u201d]+)[\"\u201d]",
    re.DOTALL,
)
"""Markdown's code, LaTeX's formulas, boxes and texts, and quotation marks."""
_LAST = re.compile(
    r"(?:\*\*([^*]+)\*\*|(?<!\band )(?<!\bor )(?<!\$, )\$([^$]*[\d\\][^$]*)\$|\\\((.*[\d\\].*)\\\))\W*$"
)
"""Bold text, or a formula that is more than a letter, at the end of a line."""
_CHOICE = re.compile(
    r"(?:[\s($*\[{]|\\text(?:bf|rm)?|\\math(?:bf|rm)|(?i:option|choice)\s)*((?i:yes|no|true|false)|[A-Za-z])(?:[\s}$*]*(?:[)\]]|:(?!\w\b)|,?\s+(?:because|since|as|(?:and\s+)?not)\b|\s+is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?\W*\Z|(?<=\w\w)[,;](?!\s*(?:wait|but|or|no|yes)\b)|(?P<dot>\.(?=\s+\S))|[.!]?[\s}$*]*\Z))"
)
_VERDICTS = {"yes": True, "true": True, "no": False, "false": False}

_LABEL = re.compile(r"(?<!\w)[A-Za-z][):](?!\w)")
"""Of a further part, as in "A: knight, B: knave", which is no choice of A."""


class AnswerKind(NamedTuple):
    """How one kind of answer is extracted and compared."""

    extract: Callable[[str], str | None]
    """Returns the answer in a text, or None if there is none."""
    equal: Callable[[str, str], bool]
    """Returns whether two answers are equal."""


def last_number(text: str) -> str | None:
    """Returns the number in the last box or <answer>, or else the last in the text; an expression that is no number as it is.

    Example: last_number("so 3 x 400 = 1,200.") == "1,200", and last_number("between 15-20") == "15-20".
    """
    text = without_thinking(text)
    marked = _marked(text)
    found = _numbers(text if marked is None else marked)
    return found[-1] if found else None


def first_number(text: str) -> str | None:
    """Returns the first number in a text. Example: first_number("18 dollars for 2") == "18"."""
    found = _numbers(text)
    return found[0] if found else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, None if it does not end. Example: last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    return _boxed(without_thinking(text)) or None


def last_tagged(text: str) -> str | None:
    """Returns the content of the last <answer>...</answer>. Example: last_tagged("<answer> 4 </answer>") == "4"."""
    before, _, _ = without_thinking(text).rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.partition("</answer>")[0].strip() if opened else None


def final_answer(text: str) -> str:
    """Returns the answer in a text, in the first of these formats that it has.

    A line "Answer: D" after the last box; the last \\boxed{...}, "" if it does not end; the last <answer>...</answer>;
    after the last "####", "answer is" or "answer:", the rest of the sentence; the last line, or the bold text or formula at its end. Without Markdown's and
    LaTeX's signs around it.

    Example: final_answer("so the answer is 12.") == "12"
    """
    text = without_thinking(text)
    _, *after_boxes = BOX.split(text)
    letters = _LETTER_LINE.findall(after_boxes[-1]) if after_boxes else []
    if letters:
        return letters[-1]
    marked = _marked(text)
    if marked is not None:
        return marked.strip()
    _, *after = _MARK.split(text)
    if after and not _RETRACTED.search(after[-1]):
        return _bare(_SENTENCE_END.split(after[-1], maxsplit=1)[0])
    last = (text.strip().splitlines() or [""])[-1]
    found = _LAST.search(last[-_LONGEST_FORMULA:])
    return _bare(found[found.lastindex] if found else last)


def _bare(text: str) -> str:
    """Returns the text without a full stop, and without quotation marks, Markdown's and LaTeX's signs around all of it."""
    for _ in range(_MOST_SIGNS):
        inner = text.strip(" *\r\n").rstrip(".\u3002").strip(" *")
        found = _WRAPPED.fullmatch(inner)
        if not found:
            return inner or text.strip()
        text = found[found.lastindex]
    return text.strip()


@functools.lru_cache(maxsize=4096)  # a group's completions have one expected answer
def as_number(text: str) -> Fraction | None:
    """Parses a number, ignoring "$" and "%"; None for other text. A comma separates thousands alone.

    Example: as_number("$1,200.50") == Fraction("1200.5"), as_number("3 and 1/2") == Fraction(7, 2), as_number("$5k") == 5000,
    and as_number("24,5") and as_number("5k") are None.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    number = _NUMBER.fullmatch(_plain(text).strip(" \n\t%*").rstrip("$€£¥₹. "))
    is_formula = number is not None and number["letter"] and text.rstrip().endswith("$")  # $5k$
    if number is None or is_formula or (number["sign"] and number["inner"]):
        return None
    try:
        if number["top"]:
            value = int(number["whole"] or 0) + Fraction(
                int(_digits(number["top"])), int(number["bottom"])
            )
        else:
            value = Fraction(_digits(number["decimal"]) + (number["exponent"] or ""))
    except ZeroDivisionError:
        return None
    value *= _MONEY_SCALES[number["letter"].strip()[0].lower()] if number["letter"] else 1
    value *= math.prod(_SCALES[word.removesuffix("s")] for word in number["scale"].lower().split())
    return -value if "-" in (number["sign"], number["inner"]) else value


def equal_numbers(answer: str, expected: str) -> bool:
    """Returns whether both are numbers of equal value, such as "1,200.0" and "1200"."""
    left, right = as_number(answer), as_number(expected)
    return left is not None and left == right


def equal_texts(answer: str, expected: str) -> bool:
    """Returns whether both texts are equal, but for signs around them as in "**yes**."

    If the expected one is a choice, such as "E", "(E) text" or "yes", it is equal to "E: text", and yes to "Yes, it is".
    """
    if len({unicodedata.normalize("NFC", _bare(text)) for text in (answer, expected)}) == 1:
        return True
    right, chosen = _CHOICE.match(expected), _CHOICE.match(answer)
    if right is None or chosen is None or right["dot"] or _LABEL.search(expected, right.end()):
        return False
    if len(right[1]) > 1 and right.end() < len(expected):  # "no, thanks"
        return False
    return _VERDICTS.get(right[1].lower(), right[1]) == _VERDICTS.get(chosen[1].lower(), chosen[1])


def equal_words(answer: str, expected: str) -> bool:
    """Returns whether both are equal_texts, ignoring case, white space and "the" in front."""
    left, right = (
        " ".join(text.casefold().split()).removeprefix("the ") for text in (answer, expected)
    )
    return equal_texts(left, right)


def _plain(text: str) -> str:
    for pattern, replacement in _PLAIN_FORMS:
        text = pattern.sub(replacement, text)
    return text


def _numbers(text: str) -> list[str]:
    return [
        found[0].strip().removesuffix(".")
        for found in _IN_TEXT.finditer(_plain(text))
        if not found["no"]
    ]


def _digits(text: str) -> str:
    return re.sub("[, ]", "", text)


def _marked(text: str) -> str | None:
    """Returns what the last box holds, "" if it does not end; without a box, the last <answer>; else None. "- 7" is "-7" there."""
    boxed = _boxed(text)
    marked = last_tagged(text) if boxed is None else boxed
    return marked and re.sub(r"(^|=)\s*-\s+(?=[\d.])", r"\1-", marked)


def _boxed(text: str) -> str | None:
    r"""Returns what the last box holds, "" if it does not end, None without a box; "1 and 2" of \boxed{1}, \boxed{2}."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    boxed, end = None, 0
    for box in BOX.finditer(text):
        follows = boxed and _BETWEEN_BOXES.fullmatch(text, end, box.start())
        start = box.end()
        if text[start] == "{":
            content = text[start + 1 : closing.get(start, start)]
            end = closing.get(start, start) + 1
        else:  # as \boxed 5, which ends with the formula
            end = _FORMULA_END.search(text, start, start + _LONGEST_FORMULA).start()
            content = text[start:end].strip().rstrip(".")
        boxed = f"{boxed} and {content}" if follows and content else content
    return boxed


KINDS = {
    "text": AnswerKind(lambda text: without_thinking(text).strip(), equal_words),
    "tag": AnswerKind(last_tagged, equal_words),
    "number": AnswerKind(last_number, equal_numbers),
}
"""Answer kinds by the name used in configs."""
