"""gsm8k: grade-school word problems with a number as answer; 7,473 for training, 1,319 held out."""

import re
from dataclasses import dataclass

from torchtitan_rl.data.answer_kinds import KindName
from torchtitan_rl.data.answers import first_number, last_boxed
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.data.tool_calls import without_thinking

ANSWER = re.compile(r"####(?:\s|\*|`|\\\()*([-+\u2212\u2013\uff0d$€£¥₹\\.\d][^\n#]*)")


class Gsm8k(Rows):
    """The published rows: `question`, and an `answer` that ends with #### and the number. Completions must end like that."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rows.Config):
        path: str = "openai/gsm8k"
        """The data set's name on the hub, or a file or folder with the same columns."""

        subset: str = "main"
        held_out_split: str = "test"
        template: str = "{question}\nReason step by step, and end with #### and the number alone, for example: #### 42"
        answer_kind: KindName = "number"

    def extract_answer(self, text: str) -> str | None:
        answers = ANSWER.findall(without_thinking(text))
        answer = answers[-1] if answers else ""
        return first_number((last_boxed(answer) or "") if "\\boxed" in answer else answer)

    def expected_answer(self, text: str) -> str | None:
        return super().expected_answer(self.extract_answer(text) or "")
