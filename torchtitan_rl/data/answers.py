r"""The answer in a completion, after its thinking (</think>), and its comparison with the expected answer.

docs/data.md says in one sentence for each kind of answer what counts. A final answer is the content of the last \boxed{}, else of the
last <answer>, else the rest of the sentence after the last "####", "answer:" or "answer is", else the last line.
"""

import functools
import math
import re
import unicodedata
from fractions import Fraction

from torchtitan_rl.data.tool_calls import without_thinking

OR = "\nor\n"
"""Between the accepted answers of a row that has several."""
_LONGEST_NUMBER = 100
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


def _nfkc(match: re.Match[str]) -> str:
    """Returns the matched signs as plain ones. Example: "\uff15" is 5, "\u00bd" is 1\u20442."""
    return unicodedata.normalize("NFKC", match[0])


_PLAIN_FORMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\uff01-\uff0b\uff0d-\uff5e\uffe5]", _nfkc),
        ("[\u2212\u2013]", "-"),
        ("(?<=\\d)\u066b(?=\\d)", "."),
        (r"\\!|\\(?=[$%])", ""),
        (r"(?:\^\s*\{?\\circ\}?|\u00b0)(?:\s?(?:\\text\{|\\mathrm\{)?\s?[CF]\b\}?)?", ""),
        (r"(?<=\d)\{,\}(?=\d)|(?<=\d)(?:\\[, ;]|[\u00a0\u066c\u2009\u202f'\u2019_])(?=\d{3})", ","),
        ("[\u00bc-\u00be\u2150-\u215e]", lambda match: f" {_nfkc(match)}"),
        ("[\u2044\u2215]", "/"),
        (
            r"\\[dtc]?frac\s?(?:\{\s?([-+]?\d{1,99})\s?\}|(\d))\s?(?:\{\s?(\d{1,99})\s?\}|(\d))",
            r" \1\2/\3\4",
        ),
        (r"-\s+(?=\d{1,99}/)", "-"),
        (rf"(?<=\d)\s?\\text\{{\s*({'|'.join(_SCALES)})s?\s*\}}", r" \1"),
        (
            "[\u00b2\u00b3\u00b9\u2070-\u2079\u207b]+",
            lambda match: f"^{{{_nfkc(match)}}}".replace("\u2212", "-"),
        ),
        (r"(?<=\d)\s?(?:\u00d7|\\times|\\cdot|\*|x)\s?10\s?\^\s?\{?([-+]?\d{1,3})\}?", r"e\1"),
        (r"(?<![\w.^{])10\s?\^\s?\{?([-+]?\d{1,3})\}?", r"1e\1"),
        (
            r"(?<=\d)\s?[\u4e07\u4ebf]",
            lambda match: "e4 " if match[0].endswith("\u4e07") else "e8 ",
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
    (?(money)(?:(?P<letter>(?ai:[kmbt]|\ ?[mbt]n))(?![\w$-]))?)
    (?P<scale>(?:\ +(?ai:{"|".join(_SCALES)})s?\b)*)""",
    re.VERBOSE,
)
_IN_TEXT = re.compile(
    rf"""(?:{_LETTER}|[)\]}}])[-+][.\d][^\s=]*  # x-5
    | \\(?:sqrt|[dtc]?frac|log)[^\s=]* | √[^\s=]*
    | (?<![\d_^])(?<!{_LETTER})(?<![_^]\{{)(?<!\d\.)(?:{_NUMBER.pattern})
      (?: (?:[-/:,.+*_][$]?\d|[eE][-+]?\d|/(?![a-z]{{3}})|\^|\s?\\(?:sqrt|pi|cdot|times|[dtc]?frac)\s?|[√π]
      |(?:[kKMBxyz]|mn|bn|tn)(?!\w)|(?:\ [+*\u00d7]\ [$]?[\d.,]+)+)[^\s=]* )?""",
    re.VERBOSE,
)
"""A number in a text, or a longer expression whose parts are no answer, such as the range 15-20, 5k or \\sqrt{2}."""

BOX = re.compile(r"\\f?boxed\s*(?=\{)|\\fbox\s*(?=\{)|\\boxed\s+(?=[^\s{])")
_FORMULA_END = re.compile(r"[$\n]|\\[\])]|\Z")
_BRACE = re.compile("[{}]")
_MARK = re.compile(
    r"(?:####|answer\**(?:\s+is\b|\s*[:\uff1a])|\u7b54\u6848[:\uff1a])[\s:*]*", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"\.\s|[\n\u3002]")
_WRAPPED = re.compile(
    r"(`+)([^`]+)\1|(\$+)([^$]+)\3|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:text(?:bf|it|rm)?|math(?:bf|rm)|f?boxed)\{([^{}]+)\}|[\"\u201c]([^\"\u201c\u201d]+)[\"\u201d]",
    re.DOTALL,
)
"""Markdown's code, LaTeX's formulas, boxes and texts, and quotation marks."""
_LETTER_ALONE = re.compile(r"\(?([A-Za-z])\)?")
_CHOICE = re.compile(
    r"(?:\\(?:text|math)\w*\{|[(*$\s])*([A-Za-z])[).:}*$]*(?:(?<=[).:}])\\?\s.*)?", re.DOTALL
)
"""A letter: alone, or with a bracket, full stop or colon and a text after it. Example: "(E) 12"."""
_VERDICTS = {"yes": "true", "no": "false"}


def last_number(text: str) -> str | None:
    """Returns the last number in the last box or <answer>, or else in the text; an expression that is no number as it is.

    Example: last_number("so 3 x 400 = 1,200.") == "1,200", and last_number("between 15-20") == "15-20".
    """
    text = without_thinking(text)
    inside = marked(text)
    numbers = _numbers(text if inside is None else inside)
    return numbers[-1] if numbers else None


def first_number(text: str) -> str | None:
    """Returns the first number in a text. Example: first_number("18 dollars for 2") == "18"."""
    numbers = _numbers(text)
    return numbers[0] if numbers else None


def without_unit(text: str) -> str:
    """Returns the number of a text that begins with its only one. Example: without_unit("4,940 km") == "4,940"."""
    numbers = _numbers(text)
    begins = len(numbers) == 1 and _plain(text).strip().startswith(numbers[0])
    return numbers[0] if begins else text


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, None if it does not end. Example: last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    return _boxed(without_thinking(text)) or None


def last_tagged(text: str) -> str | None:
    """Returns the content of the last <answer>...</answer>. Example: last_tagged("<answer> 4 </answer>") == "4"."""
    before, _, _ = without_thinking(text).rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.partition("</answer>")[0].strip() if opened else None


def final_answer(text: str) -> str:
    """Returns the final answer in a text, as the head of this file says, without Markdown's and LaTeX's signs around it.

    Example: final_answer("so the answer is 12.") == "12"
    """
    text = without_thinking(text)
    inside = marked(text)
    if inside is not None:
        return inside.strip()
    _, *after = _MARK.split(text)
    if after:
        return _bare(_SENTENCE_END.split(after[-1], maxsplit=1)[0])
    return _bare((text.strip().splitlines() or [""])[-1])


def last_choice(text: str) -> str | None:
    """Returns the letter that the final answer begins with, alone or as in "(E)", "E. text" and "E: text"; None without one."""
    return _letter(final_answer(text))


def _letter(text: str) -> str | None:
    choice = _CHOICE.fullmatch(text.strip())
    return choice and choice[1].upper()


def _bare(text: str) -> str:
    """Returns the text without a full stop, and without quotation marks, Markdown's and LaTeX's signs around all of it."""
    for _ in range(_MOST_SIGNS):
        inner = text.strip(" *\r\n").rstrip(".\u3002").strip(" *")
        wrapped = _WRAPPED.fullmatch(inner)
        if not wrapped:
            return inner or text.strip()
        text = wrapped[wrapped.lastindex]
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
            part = Fraction(int(_digits(number["top"])), int(number["bottom"]))
            value = int(number["whole"] or 0) + part
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
    """Returns whether both texts are equal, but for signs around them as in "**yes**".

    yes is true, and no is false. An expected letter, such as "E" or "(E)", is equal to a choice of it, such as "E: text".
    """
    left, right = (unicodedata.normalize("NFC", _bare(text)) for text in (answer, expected))
    letter, choice = _LETTER_ALONE.fullmatch(right), _CHOICE.fullmatch(left)
    if letter and choice:
        return letter[1] == choice[1]
    return _VERDICTS.get(left.lower(), left) == _VERDICTS.get(right.lower(), right)


def equal_words(answer: str, expected: str) -> bool:
    """Returns whether both are equal_texts, ignoring case, white space and "the" in front."""
    plain = [" ".join(text.casefold().split()) for text in (answer, expected)]
    return equal_texts(*(text.removeprefix("the ") for text in plain))


def equal_choices(answer: str, expected: str) -> bool:
    """Returns whether both begin with the same letter, as "(E)" and "E. text" do."""
    letter = _letter(answer)
    return letter is not None and letter == _letter(expected)


def equal_values(answer: str, expected: str) -> bool:
    """Returns whether both are equal as numbers or as words."""
    return equal_numbers(answer, expected) or equal_words(answer, expected)


def _plain(text: str) -> str:
    for pattern, replacement in _PLAIN_FORMS:
        text = pattern.sub(replacement, text)
    return text


def _numbers(text: str) -> list[str]:
    return [match[0].strip().removesuffix(".") for match in _IN_TEXT.finditer(_plain(text))]


def _digits(text: str) -> str:
    return re.sub("[, ]", "", text)


def marked(text: str) -> str | None:
    """Returns what the last box holds, "" if it does not end; else the last <answer>, or None. "- 7" is "-7" there."""
    boxed = _boxed(text)
    inside = last_tagged(text) if boxed is None else boxed
    return inside and re.sub(r"(^|=)\s*-\s+(?=[\d.])", r"\1-", inside)


def _boxed(text: str) -> str | None:
    r"""Returns what the last box holds, "" if it does not end, None without a box."""
    *_, box = [None, *BOX.finditer(text)]
    if box is None:
        return None
    start = box.end()
    if text[start] != "{":  # as $\boxed 5$, which ends with the formula
        return text[start : _FORMULA_END.search(text, start).start()].strip().rstrip(".")
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()]
    return ""
