"""`RowReader`: which columns of a table are the prompt, the answer and the completion, and how a row becomes an example."""

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from torchtitan_rl.data.answers import OR
from torchtitan_rl.data.chat_messages import REASONING, Message
from torchtitan_rl.data.row_messages import (
    check_has_no_media,
    prompt_messages,
    read_messages,
    read_tools,
    written_calls,
)
from torchtitan_rl.data.table import Row, RowError, Table
from torchtitan_rl.data.task import RESERVED_COLUMNS, Example, Task
from torchtitan_rl.errors import expect
from torchtitan_rl.text import strings

PROMPT_COLUMNS = (
    "prompt", "messages", "question", "problem", "conversations", "conversation", "query", "instruction",
)  # fmt: skip
ANSWER_COLUMNS = ("answer", "expected_answer", "ground_truth")
COMPLETION_COLUMNS = ("completion", "response")
TOOL_COLUMNS = ("tools", "tool_defs")
SYSTEM_COLUMNS = ("system", "system_prompt")
NESTED_ANSWERS = ("reward_model", "reward_spec", "verification_info", "info", "answer")
"""Columns whose objects, or their JSON texts, may have the answer in one of ANSWER_COLUMNS."""
NUM_SHOWN = 10
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RowReader:
    """Reads the rows of one table as examples."""

    def __init__(
        self,
        table: Table,
        config: Task.Config,
        read_answer: Callable[[str], str | None],
        answer_columns: Sequence[str],
    ) -> None:
        """`read_answer`: an answer's text as the task compares it, or None. Raises UserError, naming a setting of the columns."""
        self.table = table
        self._config = config
        self._read_answer = read_answer
        self._first: dict[str, Any] = self._columns()
        self.columns = list(self._first)
        self.demonstrates = config.demonstrations != "none"
        self.prompt_column = self._named_or_first("prompt_column", self._prompt_columns())
        self.answer_column = self._answer_column(answer_columns)
        self.completion_column = self._completion_column()
        self._joined = self._joined_columns()
        expect(
            bool(self.prompt_column or config.template), "task.prompt_column", config.prompt_column,
            f"the column of {table.name} that holds the prompt, but it has {self.columns}", "Name one of them.",
        )  # fmt: skip
        shown = bool(self.answer_column) and f"{{{self.answer_column}}}" in config.template
        expected = "one without task.answer_column, which the prompt would show"
        expect(not shown, "task.template", config.template, expected, "Take it out.")

    def example(self, row: Row) -> Example:
        """Returns the row as an example. Raises RowError if it cannot be one."""
        check_has_no_media(row)
        prompt = value_at(row, self.prompt_column) if self.prompt_column else ""
        tools = None
        if "{tool" not in self._config.template:
            tools = next(filter(None, map(row.get, TOOL_COLUMNS)), None)
        prompt = self._after_columns(prompt, row)
        demonstration = None
        if self.demonstrates:
            prompt, demonstration = self._divided(prompt, row)
        if isinstance(prompt, list) and not self._config.template:
            text, messages = "", prompt_messages(prompt)
        else:
            text = self._text(prompt, row)
            messages = [{"role": "user", "content": text.strip()}]
        used = (self.prompt_column, self.completion_column, *RESERVED_COLUMNS)
        example = Example(
            text=text,
            messages=messages,
            is_text=bool(text),
            expected_answer=self._answer(row),
            columns={column: row.get(column) for column in self.columns if column not in used},
            tools=read_tools(tools),
            demonstration=demonstration,
        )
        parts = [text, messages, example.expected_answer, example.tools, demonstration]
        if any(_LONE_SURROGATE.search(part) for part in strings(parts)):
            raise RowError("characters that UTF-8 cannot encode (lone surrogates)")
        return example

    def summary(self) -> str:
        """Returns the columns that are read and those that no prompt or answer is made of, in words.

        Example: "data.jsonl: prompt from column conversations; not in the prompt: id, source"
        """
        named = {
            "prompt": "task.template" if self._config.template else self.prompt_column,
            "completion": self.completion_column,
            "answer": self.answer_column,
        }
        parts = [", ".join(f"{what} from column {c}" for what, c in named.items() if c)]
        outer = {column.partition(".")[0] for column in named.values()}
        used = {"id", *TOOL_COLUMNS, *self._joined, *named.values(), *outer}
        unread = [column for column in self.columns if column not in used]
        if unread and not self._config.template:
            more = ", ..." if len(unread) > NUM_SHOWN else ""
            parts.append(f"not in the prompt: {', '.join(unread[:NUM_SHOWN])}{more}")
        if reserved := sorted(RESERVED_COLUMNS & {*unread}):
            parts.append(f"not given to reward functions: {', '.join(reserved)}")
        return f"{self.table.name}: {'; '.join(parts)}"

    def _columns(self) -> dict[str, Any]:
        """Returns the columns of any row, in order of first appearance, each with its first value that is not missing."""
        first: dict[str, Any] = {}
        for row in self.table:
            for column, value in row.items():
                if _is_missing(first.setdefault(column)):
                    first[column] = value
        return first

    def _prompt_columns(self) -> list[str]:
        """Returns the usual columns of the prompt. Those that end with the assistant's turn come last, or first to learn them."""
        usual = [*PROMPT_COLUMNS]
        completions = {*COMPLETION_COLUMNS}
        if self.demonstrates:
            completions.add("chosen")
            if isinstance(self._first.get("chosen"), list):
                usual.append("chosen")
        if self.demonstrates and (self._config.completion_column or completions & {*self.columns}):
            return usual

        def is_answered(column: str) -> bool:
            return _last_role(self._first.get(column)) in ("assistant", "gpt")

        return sorted(usual, key=lambda column: is_answered(column) != self.demonstrates)

    def _answer_column(self, usual: Sequence[str]) -> str:
        """Returns the configured column of the answer, else the first usual one, which may be inside an object."""
        nested = [f"{column}.{name}" for column in NESTED_ANSWERS for name in ANSWER_COLUMNS]
        inside = [name for name in nested if name.startswith("answer.")]
        return self._named_or_first("answer_column", (*inside, *usual, *nested))

    def _completion_column(self) -> str:
        """Returns the configured column of the completion, else the first usual one; "" without demonstrations."""
        if not self.demonstrates:
            return ""
        usual = [*COMPLETION_COLUMNS, "chosen"]
        if self.prompt_column == "instruction":
            usual.append("output")
        usual = [column for column in usual if column != self.prompt_column]
        return self._named_or_first("completion_column", usual)

    def _named_or_first(self, setting: str, usual: Sequence[str]) -> str:
        """Returns the configured column, else the first of the `usual` columns that has a value, else ""."""
        name = getattr(self._config, setting)
        if not name:
            filled = (each for each in usual if not _is_missing(value_at(self._first, each)))
            return next(filled, "")
        remedy = f"It has {self.columns}."
        if self._config.template:
            remedy += " For another one, give task.template too, '' for none."
        exists = name in self.columns or name.partition(".")[0] in self.columns
        expect(exists, f"task.{setting}", name, f"a column of {self.table.name}", remedy)
        return name

    def _joined_columns(self) -> set[str]:
        """Returns the columns of which the prompt is made besides its own, where the config names neither it nor a template."""
        if self._config.prompt_column or self._config.template:
            return set()
        known = {*SYSTEM_COLUMNS}
        if self.prompt_column == "instruction":
            known |= {"input", "context", "history"}
        return known & {*self.columns}

    def _after_columns(self, prompt: Any, row: Row) -> Any:
        """Returns the prompt after what the columns of a system message and LLaMA-Factory's `history` say, if they do."""
        joined = {name: row[name] for name in self._joined if not _is_missing(row.get(name))}
        history = joined.pop("history", [])
        systems = [joined[name] for name in SYSTEM_COLUMNS if name in joined]
        before = [{"role": "system", "content": system} for system in systems]
        if not (before or history):
            return prompt
        messages = prompt
        if not isinstance(prompt, list):
            messages = [{"role": "user", "content": self._text(prompt, row)}]
        first = [message for message in read_messages(messages[:1]) if message["role"] == "system"]
        if before and first and first != before:
            prompt = self.prompt_column
            raise RowError(f"a system message in {prompt!r} and another in 'system'; leave out one")
        before = before[len(first) :]
        pairs = history if isinstance(history, list) else [history]
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise RowError("'history' is no list of pairs, each a question and its answer")
            before.append({"role": "user", "content": pair[0]})
            before.append({"role": "assistant", "content": pair[1]})
        return before + messages

    def _divided(self, prompt: Any, row: Row) -> tuple[Any, list[Message]]:
        """Returns the row's prompt and the messages to learn from, up to the last assistant turn; [] if there are none."""
        completion = self._completion(row)
        if completion and completion[0]["role"] in ("system", "developer", "user"):
            prompt, completion = self._without_prompt(prompt, completion)
        if not isinstance(prompt, list):
            return prompt, completion
        whole = read_messages([*prompt, *completion])
        turns = [place for place, message in enumerate(whole) if message["role"] == "assistant"]
        if not turns:
            return prompt, []
        first = len(prompt) if self.completion_column else 0
        learned = [place for place in turns if place >= first]
        if self._config.demonstrations == "last":
            learned = learned[-1:]
        if not learned:
            return whole[: len(prompt)], []
        begin = learned[0]
        if begin and whole[begin - 1]["role"] == "assistant":
            fault = "of which the second answers nothing"
            raise RowError(f"two messages of the assistant's in a row, {fault}; join them")
        if not all(_has_content(whole[place]) for place in learned):
            return whole[:begin], []
        return whole[:begin], whole[begin : turns[-1] + 1]

    def _completion(self, row: Row) -> list[Message]:
        """Returns the messages in the row's completion column; [] if it is empty or there is no such column."""
        completion = value_at(row, self.completion_column) if self.completion_column else None
        if calls := row.get("tools") and written_calls(completion):
            completion = [{"role": "assistant", "content": "", "tool_calls": calls}]
        if _is_missing(completion):
            return []
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not isinstance(completion, list):
            raise RowError(f"{self.completion_column!r} is neither text nor a list of messages")
        return read_messages(completion)

    def _without_prompt(
        self, prompt: Any, whole: list[Message]
    ) -> tuple[list[Message], list[Message]]:
        """Returns the prompt and what follows it, of a completion that repeats the prompt, as those of preference pairs."""
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        question = [_role_and_text(message) for message in read_messages(prompt)]
        for begin in range(len(whole) - len(question)):
            end = begin + len(question)
            if [_role_and_text(message) for message in whole[begin:end]] == question:
                return whole[:end], whole[end:]
        raise RowError(
            f"{self.completion_column!r} does not begin with the assistant's turn or with {self.prompt_column!r}"
        )

    def _text(self, prompt: Any, row: Row) -> str:
        if self._config.template:
            return self._filled_template(row)
        if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
            raise RowError(f"no {self.prompt_column!r}")
        if not isinstance(prompt, str):
            raise RowError(f"{self.prompt_column!r} is neither text nor a list of messages")
        for name in ("input", "context"):
            value = row.get(name) if name in self._joined else None
            if _is_missing(value) or value in ([], {}):
                continue
            text = _written(value)
            if text is None:
                raise RowError(f"{name!r} is neither text nor a number")
            prompt = f"{prompt}\n\n{text}"
        if re.match(r'\s*\[\s*\{\s*["\'](role|content)["\']', prompt):
            name = self.prompt_column
            raise RowError(
                f"{name!r} is text that lists messages; write a list, in JSON or Parquet"
            )
        return prompt

    def _filled_template(self, row: Row) -> str:
        values = {column: value for column, value in row.items() if value is not None}
        try:
            return self._config.template.format(**values)
        except KeyError as error:  # a column that other rows have
            raise RowError(f"no column {error} for task.template") from error
        except (ValueError, AttributeError, TypeError, IndexError) as error:
            raise RowError(f"task.template cannot be filled: {error}") from error

    def _answer(self, row: Row) -> str:
        """Returns the row's answer as text, "" if it has none; all that it accepts with OR between them."""
        value = value_at(row, self.answer_column) if self.answer_column else None
        values = value if isinstance(value, list) else [value]
        answers = [self._one_answer(each) for each in values]
        accepted = dict.fromkeys(filter(None, answers))
        if None in answers and not accepted:
            raise RowError(f"no answer that can be read in {self.answer_column!r}")
        return OR.join(accepted)

    def _one_answer(self, value: Any) -> str | None:
        """Returns one answer as text, "" if it is empty, None if the task does not read it."""
        answer = self.table.label(self.answer_column, value)
        if _is_missing(answer):
            return ""
        text = _written(answer)
        if text is None:
            raise RowError(
                f"{self.answer_column!r} is neither text nor a number; a dotted name, such as {self.answer_column}.value, "
                "looks inside"
            )
        return self._read_answer(text)


def value_at(row: Row, name: str) -> Any:
    """Returns a column's value, or with a dotted name a value inside of an object, a list or its JSON text; None if there is none.

    Example: value_at({"reward_model": {"ground_truth": "8"}}, "reward_model.ground_truth") == "8", and
    value_at({"answers": [{"text": "8"}, {"text": "eight"}]}, "answers.text") == ["8", "eight"]
    """
    if name in row:
        return row[name]
    column, _, inner = name.partition(".")
    value = row.get(column)
    if isinstance(value, str) and inner:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list):
        inside = [value_at(item, inner) for item in value if isinstance(item, dict)]
        if any(item is not None for item in inside):
            return inside
        value = {str(place): item for place, item in enumerate(value)}
    return value_at(value, inner) if isinstance(value, dict) and inner else None


def row_count(num: int) -> str:
    """Returns a number of rows in words. Example: "1 row"."""
    return f"{num:,} row{'' if num == 1 else 's'}"


def _is_missing(value: Any) -> bool:
    """Whether a cell is empty: null, blank text, or NaN, which pandas writes for a missing value."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _written(value: Any) -> str | None:
    """Returns a text or a number as text, 8.0 as "8"; None for any other value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | Real | Decimal) else None


def _last_role(value: Any) -> str:
    """Returns the role of the last of a list of messages, "" for any other value."""
    last = value[-1] if isinstance(value, list) and value else None
    return str(last.get("role", last.get("from", ""))) if isinstance(last, dict) else ""


def _role_and_text(message: Message) -> tuple[str, str]:
    return message["role"], message["content"].strip()


def _has_content(message: Message) -> bool:
    """Whether an assistant's message says, thinks or calls something."""
    return bool(message.keys() & {*REASONING, "tool_calls"}) or bool(message["content"].strip())
