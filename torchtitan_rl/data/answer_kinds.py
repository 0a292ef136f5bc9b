r"""Kinds of answers: how the answer in a completion is read and compared, and which kind the rows of a table show."""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torchtitan_rl.data.answers import (
    OR,
    as_number,
    equal_choices,
    equal_numbers,
    equal_values,
    equal_words,
    final_answer,
    last_boxed,
    last_choice,
    last_number,
    last_tagged,
    without_unit,
)
from torchtitan_rl.data.math_answers import equal_math
from torchtitan_rl.data.tool_calls import without_thinking

KindName = Literal["text", "tag", "box", "number", "choice", "math"]

TAG = "<answer>"
TAG_REQUEST = "Give the final answer between <answer> and </answer>."
"""Asks for the kind `tag` in a prompt."""

_NEARLY_ALL, _HALF, _SOME = 0.95, 0.5, 0.05
"""Shares of the rows. The few answers that are of another kind than nearly all are left out as unreadable."""
_LETTER = re.compile(r"\(?[A-J]\)?\.?")
_OPTIONS = re.compile(r"(?<!\w)A[).:].+?(?<!\w)B[).:]", re.DOTALL)
_LATEX = re.compile(
    r"\\(?:[dtc]?frac|sqrt|pi|cdot|times|left|begin|infty|circ|text|leq?|geq?|pm|cup|cap|in|log|ln|sin|cos|tan)(?![a-zA-Z])"
    r"|[\w)}]\s?\^\s?[\w{(-]"
)


class AnswerKind(NamedTuple):
    """How one kind of answer is extracted and compared."""

    extract: Callable[[str], str | None]
    """Returns the answer in a text, or None if there is none."""
    equal: Callable[[str, str], bool]
    """Returns whether two answers are equal."""


def _equal_texts(answer: str, expected: str) -> bool:
    """Returns whether the whole answer, or the final answer in it, has the expected words."""
    return equal_words(answer, expected) or equal_words(final_answer(answer), expected)


KINDS = {
    "text": AnswerKind(lambda text: without_thinking(text).strip(), _equal_texts),
    "tag": AnswerKind(last_tagged, equal_values),
    "box": AnswerKind(last_boxed, equal_values),
    "number": AnswerKind(last_number, equal_numbers),
    "choice": AnswerKind(last_choice, equal_choices),
    "math": AnswerKind(final_answer, equal_math),
}
"""Answer kinds by the name used in configs."""

_READINGS = {
    "text": "is the expected text, or has it in \\boxed{} or <answer>, after 'answer is' or as its last line",
    "tag": "has the expected text or number in its last <answer>...</answer>",
    "number": "has the expected number as its last one",
    "choice": "has a final answer that begins with the expected letter",
    "math": "has a final answer, in \\boxed{} or at its end, that is equal to the expected one",
}
"""Which completion is right, for the kinds that `chosen_kind` chooses."""


def chosen_kind(rows: Sequence[tuple[str, str]]) -> tuple[KindName, str]:
    """Returns the kind of answers that rows show, and a line that says why and how to choose another.

    `rows`: the prompt and the expected answer of each, in which several accepted ones have OR between them.
    """

    def share(matches: Callable[[str, str], object]) -> float:
        return sum(bool(matches(prompt, answer)) for prompt, answer in rows) / max(len(rows), 1)

    numbers = share(lambda _, answer: _is_number(answer))
    if share(lambda prompt, _: TAG in prompt) >= _NEARLY_ALL:
        kind, why = "tag", f"the prompts ask for {TAG}"
    elif share(lambda prompt, answer: _is_option(answer, prompt)) >= _NEARLY_ALL:
        kind, why = "choice", "they are letters of options in the prompts"
    elif (
        numbers >= _HALF and share(lambda _, answer: _is_number(answer, units=True)) >= _NEARLY_ALL
    ):
        kind, why = "number", f"they are numbers, such as {rows[0][1]!r:.60}"
    elif share(lambda _, answer: _LATEX.search(answer)) >= _SOME:
        kind, why = "math", "there is LaTeX in them"
    else:
        shown = next((answer for _, answer in rows if not _is_number(answer)), "")
        numeric = f"{numbers:.0%} are numbers, others are not" if numbers else "they are no numbers"
        kind, why = "text", f"{numeric}, such as {shown!r:.60}"
    *others, last = (name for name in KINDS if name != kind)
    return kind, (
        f"answers are read as {kind} ({why}): a completion is right if it {_READINGS[kind]}. "
        f"Another kind: --task.answer-kind {', '.join(others)} or {last}"
    )


def _is_number(answer: str, units: bool = False) -> bool:
    read = without_unit if units else str
    return all(as_number(read(accepted)) is not None for accepted in answer.split(OR))


def _is_option(answer: str, prompt: str) -> bool:
    return bool(_LETTER.fullmatch(answer) and _OPTIONS.search(prompt))
