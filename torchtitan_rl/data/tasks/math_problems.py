"""math: problems with an answer in LaTeX, judged by math-verify: 1/2, 0.5 and \\frac{1}{2} are equal."""

import re
from dataclasses import dataclass

from torchtitan_rl.data.answer_kinds import KindName
from torchtitan_rl.data.answers import last_boxed
from torchtitan_rl.data.math_answers import is_math
from torchtitan_rl.data.rows import Rows

_SENTENCE = re.compile(r"(?!(?:and|or)\b)\b[A-Za-z]{2,}\b[^$]*\$")
"""A word before a formula, where each formula is a dollar sign: not (B) $10$, $4$ cm, or $1$ and $2$."""
_FORMULA = re.compile(r"\$+[^$]+\$+|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)


class Math(Rows):
    r"""Rows with a problem and a LaTeX answer, alone or in the \boxed{} of a solution."""

    answer_columns = (*Rows.answer_columns, "solution")

    @dataclass(kw_only=True, slots=True)
    class Config(Rows.Config):
        path: str = "DigitalLearningGmbH/MATH-lighteval"
        """12,500 competition problems by default; or any file, folder or data set with the same columns."""

        held_out_split: str = "test"
        prompt_column: str = "problem"
        template: str = (
            "{problem}\nReason step by step, and put the final answer within \\boxed{{}}."
        )
        answer_kind: KindName = "math"

    def extract_answer(self, text: str) -> str | None:
        return last_boxed(text)

    def expected_answer(self, text: str) -> str | None:
        """Returns the last boxed content, or without a box the whole text; None if math-verify cannot read it.

        "" for a sentence, of which math-verify would take any formula, and for the sign that ends a proof.
        """
        answer = last_boxed(text) or (None if "\\boxed" in text else text)
        if answer and ("\\blacksquare" in answer or _SENTENCE.search(_FORMULA.sub("$", answer))):
            return ""
        return answer if answer and is_math(answer) else None
