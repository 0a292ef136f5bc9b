"""`RowSet`: the rows of a table that can be used as examples, and the reasons for leaving out the others."""

import copy
import hashlib
import json
import math
import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from torchtitan_rl.data.answers import OR, last_tagged
from torchtitan_rl.data.chat_messages import REASONING, Message
from torchtitan_rl.data.row_messages import (
    check_has_no_media,
    is_text,
    prompt_messages,
    read_messages,
    read_tools,
    without_nulls,
    written_calls,
)
from torchtitan_rl.data.table import BATCH, Row, RowError, Table
from torchtitan_rl.data.task import RESERVED_COLUMNS, Example, Task
from torchtitan_rl.errors import UserError, expect

PROMPT_COLUMNS = (
    "prompt",
    "messages",
    "question",
    "problem",
    "conversations",
    "conversation",
    "query",
    "instruction",
)
ANSWER_COLUMNS = ("answer", "expected_answer", "ground_truth")
COMPLETION_COLUMNS = ("completion", "response")
TOOL_COLUMNS = ("tools", "tool_defs")
SYSTEM_COLUMNS = ("system", "system_prompt")
NESTED_ANSWERS = ("reward_model", "reward_spec", "verification_info", "info", "answer")
"""Columns whose objects, or their JSON texts, may have the answer in one of ANSWER_COLUMNS."""
FORMATS = {
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
    "preference pairs": ("chosen", "rejected"),
    "verl": ("prompt", "reward_model"),
    "prime-rl": ("prompt", "verification_info"),
    "OpenAI chat": ("messages", "tools"),
}
"""Formats that people have, and the columns by which they are known."""
_NUM_SHOWN = 10
_MOST_UNREADABLE = 0.01
"""Share of the rows whose answer may be unreadable: they are left out. If there are more, the answer column is wrong."""
_NO_UTF8 = "has characters that UTF-8 cannot encode (lone surrogates)"


class _UnreadableAnswer(RowError):
    """The answer of a row is not what the task reads."""


class RowSet:
    """Rows of one table as examples. It holds only row indices and reads a row from the table on access."""

    def __init__(
        self,
        table: Table,
        config: Task.Config,
        read: Callable[[str], str | None],
        answers: Sequence[str],
    ):
        """Reads every row once; `answers`: columns that may have the answer. Raises UserError with the numbers of the invalid rows."""
        self.table = table
        self._config = config
        self._read_answer = read
        self._whole_numbers: set[str] = set()
        """Columns of integers that pandas wrote as 8.0, because a cell is empty."""
        self._first: dict[str, Any] = self._columns()
        self.columns = list(self._first)
        self._demonstrates = config.demonstrations != "none"
        pairs = ("chosen",) * self._demonstrates
        with_prompt = pairs if isinstance(self._first.get("chosen"), list) else ()
        usual = [*PROMPT_COLUMNS, *with_prompt]
        has_completion = bool(
            config.completion_column or {*COMPLETION_COLUMNS, *pairs} & {*self.columns}
        )
        if not (self._demonstrates and has_completion):
            is_answered = {
                column: _last_role(self._first.get(column)) in ("assistant", "gpt")
                for column in usual
            }
            usual.sort(key=lambda column: is_answered[column] != self._demonstrates)
        self.prompt_column = self._named_or_first("prompt_column", usual)
        self.answer_column = self._answer_column(answers)
        expect(
            self._demonstrates or not config.completion_column, "task.completion_column", config.completion_column,
            "none without task.demonstrations", "Set task.demonstrations to last or all.",
        )  # fmt: skip
        usual = [column for column in (*COMPLETION_COLUMNS, *pairs) if column != self.prompt_column]
        usual += ["output"] * (self.prompt_column == "instruction")
        self.completion_column = (
            self._named_or_first("completion_column", usual) if self._demonstrates else ""
        )
        for setting in ("answer_column", "completion_column"):
            column = getattr(self, setting)
            expect(
                not column or column != self.prompt_column, f"task.{setting}", column, "another column than that of the prompt",
                f"Correct it, or task.prompt_column. {table.name} has {self.columns}.",
            )  # fmt: skip
        expect(
            bool(self.prompt_column or config.template), "task.prompt_column", config.prompt_column,
            f"the column of {table.name} that holds the prompt, but it has {self.columns}", "Name one of them.",
        )  # fmt: skip
        self._check_template()
        self.left_out: dict[str, list[str]] = defaultdict(list)
        """Numbers of the rows left out, by reason."""
        self.kept, self.keys = self._scan()

    def example(self, place: int) -> Example:
        """Returns the kept row at index `place` as an example."""
        [row] = self.table.rows(self.kept[place : place + 1])
        return self._example(row)

    def batches(self) -> Iterator[list[Example]]:
        """Yields all kept rows as examples, in batches."""
        for start in range(0, len(self.kept), BATCH):
            yield [self._example(row) for row in self.table.rows(self.kept[start : start + BATCH])]

    def leave_out_where(self, where: np.ndarray, reason: str) -> None:
        """Leaves out the kept rows for which `where` [kept] is true."""
        if where.any():
            self.left_out[reason] += [self.table.number(int(index)) for index in self.kept[where]]
            self.kept, self.keys = self.kept[~where], self.keys[~where]

    def split_off(self, share: float, seed: int) -> "RowSet":
        """Moves a share of the kept rows, at least one, to a new set and returns it.

        The choice and order depend only on the prompts and the seed, not on the order of the rows.
        """
        ranks = [
            hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest() for key in self.keys
        ]
        order = np.array(sorted(range(len(ranks)), key=ranks.__getitem__), dtype=np.int64)
        first = order[: max(1, round(share * len(order)))]
        chosen = order[
            np.isin(self.keys[order], self.keys[first])
        ]  # a prompt may have several demonstrations
        other = copy.copy(self)
        other.kept, other.keys = self.kept[chosen], self.keys[chosen]
        other.left_out = defaultdict(list)
        self.kept, self.keys = np.delete(self.kept, chosen), np.delete(self.keys, chosen)
        return other

    def describe(self, what: str) -> str:
        """Returns a summary.

        Example: "data.jsonl: 95 rows for training; left out: 3 without an answer (rows 4, 9, 17)".
        """
        parts = [f"{self.table.name}: {_count(len(self.kept))} {what}"]
        each = [
            f"{len(numbers):,} {reason} ({_rows(numbers)})"
            for reason, numbers in self.left_out.items()
        ]
        parts += [f"left out: {', '.join(each)}"] * bool(each)
        return "; ".join(parts)

    def remedy(self) -> str:
        """Returns what to do about the reason for which most rows were left out."""
        reason = max(self.left_out, key=lambda each: len(self.left_out[each]), default="")
        if reason.startswith("without"):
            column, turns = (
                f"task.{reason.split()[-1]}_column",
                ", or end messages with the assistant's turn",
            )
            turns *= reason.endswith("completion")
            return f"Set {column} to the column that has it ({self.table.name} has {self.columns}), or fill it{turns}."
        if reason == "also held out":
            return "Hold out other rows (task.held_out_path), or leave it out: a share of these is held out then."
        if reason and not reason.endswith("earlier row"):
            return "Raise prompts.max_prompt_tokens, or correct the rows."
        return "Add rows with different prompts, or name a held-out file (task.held_out_path)."

    def _check_template(self) -> None:
        """Raises UserError unless task.template names columns of the table, at least one."""
        template, problem = self._config.template, ""
        try:
            names = [
                name for _, name, _, _ in string.Formatter().parse(template) if name is not None
            ]
        except ValueError as error:
            names, problem = [], str(error)
        missing = [name for name in names if re.split(r"[.\[]", name)[0] not in self.columns]
        shown = [name for name in names if name == self.answer_column]
        chats = "".join([name for name in names if _last_role(self._first.get(name))][:1])
        problem = problem or (f"{missing} are none" if missing else "it names none" * (not names))
        problem = problem or f"{shown} is task.answer_column, which the prompt would show" * bool(
            shown
        )
        problem = problem or f"{chats!r} has messages; {{{chats}[0][content]}} is a text" * bool(
            chats
        )
        expect(
            not (template and problem), "task.template", template, f"columns of {self.table.name} in braces, but {problem}",
            f"It has {self.columns}; a brace itself is written twice.",
        )  # fmt: skip

    def _columns(self) -> dict[str, Any]:
        """Returns the columns of any row, in order of first appearance, each with its first value that is not null or ""."""
        first: dict[str, Any] = {}
        faults: dict[str, list[str]] = defaultdict(list)
        empty: set[str] = set()
        other: set[str] = set()
        for number, row in self.table.numbered_rows():
            if isinstance(row, RowError):
                faults[str(row)].append(number)
                continue
            for column, value in row.items():
                if first.setdefault(column) in (None, ""):
                    first[column] = value
                if value is None:
                    empty.add(column)
                elif self.table.has_text_cells and not re.fullmatch(r"-?\d+\.0", value):
                    other.add(column)
        self._refuse(faults)
        if self.table.has_text_cells:
            self._whole_numbers = empty - other
        return first

    def _answer_column(self, usual: Sequence[str]) -> str:
        """Returns the configured column of the answer, else the first usual one, which may be inside an object."""
        nested = [f"{column}.{name}" for column in NESTED_ANSWERS for name in ANSWER_COLUMNS]
        found = [name for name in nested if value_at(self._first, name) is not None]
        filled = [column for column in usual if self._first.get(column) not in (None, "")]
        inside = [name for name in found if name.startswith("answer.")]
        return self._named_or_first("answer_column", (*inside, *filled, *found, *usual))

    def reads(self) -> str:
        """Returns the format and the columns that no prompt or answer is made of, in words; "" if it is plain rows.

        Example: "data.jsonl: ShareGPT: conversations; not in the prompt: id, source"
        """
        named = (self.prompt_column, self.completion_column, self.answer_column)
        used = {
            "id",
            *TOOL_COLUMNS,
            *self._joined,
            *named,
            *(column.partition(".")[0] for column in named),
        }
        known = [name for name, columns in FORMATS.items() if {*columns} <= {*self.columns}]
        parts = [f"{known[0]}: {', '.join(FORMATS[known[0]])}"] if known else []
        several = "any of " * isinstance(value_at(self._first, self.answer_column), list)
        parts += (
            [f"the answer is {several}{self.answer_column}"]
            if several or "." in self.answer_column
            else []
        )
        unread = [column for column in self.columns if column not in used]
        if unread and not self._config.template:
            more = ", ..." if len(unread) > _NUM_SHOWN else ""
            parts.append(f"not in the prompt: {', '.join(unread[:_NUM_SHOWN])}{more}")
        reserved = sorted(RESERVED_COLUMNS & {*unread})
        parts += [f"not given to reward functions: {', '.join(reserved)}"] if reserved else []
        return f"{self.table.name}: {'; '.join(parts)}" if parts else ""

    @property
    def _joined(self) -> set[str]:
        """The columns of which the prompt is made besides its own, where the config names neither it nor a template."""
        known = {
            *SYSTEM_COLUMNS,
            *("input", "context", "history") * (self.prompt_column == "instruction"),
        }
        return (
            set()
            if self._config.prompt_column or self._config.template
            else known & {*self.columns}
        )

    def _refuse(self, faults: dict[str, list[str]]) -> None:
        """Raises UserError with the row numbers for each fault, if there are any."""
        if faults:
            listed = "; ".join(f"{_rows(numbers)}: {fault}" for fault, numbers in faults.items())
            count = sum(map(len, faults.values()))
            what = " task.template," if "task.template" in listed else ""
            raise UserError(
                f"task.path: {self.table.name} has {_count(count)} that cannot be used. {listed}. Correct{what} or delete them."
            )

    def _named_or_first(self, setting: str, usual: Sequence[str]) -> str:
        """Returns the configured column, else the first existing one of the `usual` columns, else ""."""
        name = getattr(self._config, setting)
        there = not name or name in self.columns or name.partition(".")[0] in self.columns
        other = " For another one, give task.template too, '' for none." * (
            self._config.template != ""
        )
        remedy = f"It has {self.columns}.{other}"
        expect(there, f"task.{setting}", name, f"a column of {self.table.name}", remedy)
        return name or next(
            (column for column in usual if column.partition(".")[0] in self.columns), ""
        )

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (indices, hashes of the prompts) of the rows to keep."""
        faults: dict[str, list[str]] = defaultdict(list)
        unreadable: dict[str, list[str]] = defaultdict(list)
        num_rows = 0
        kept: dict[
            int, tuple[int, int]
        ] = {}  # hash of prompt and demonstration: index of the first row, hash of its prompt
        repeated = (
            "equal to an earlier row" if self._demonstrates else "with the prompt of an earlier row"
        )
        for index, (number, row) in enumerate(self.table.numbered_rows()):
            num_rows += 1
            try:
                example = self._example(row)
            except _UnreadableAnswer as error:
                unreadable[str(error)].append(number)
                continue
            except RowError as error:
                faults[str(error)].append(number)
                continue
            key = _key(example.text, example.messages, example.tools, example.demonstration)
            if self._demonstrates and not example.demonstration:
                self.left_out["without a completion"].append(number)
            elif self.answer_column and not example.expected_answer:
                self.left_out["without an answer"].append(number)
            elif key in kept:
                self.left_out[repeated].append(number)
            else:
                kept[key] = index, _key(example.text, example.messages, example.tools)
        some = sum(map(len, unreadable.values())) <= _MOST_UNREADABLE * num_rows
        (self.left_out if some else faults).update(unreadable)
        self._refuse(faults)
        indices, keys = zip(*kept.values(), strict=True) if kept else ((), ())
        return np.array(indices, dtype=np.int64), np.array(keys, dtype=np.uint64)

    def _example(self, row: Row) -> Example:
        """Returns the row as an example. Raises RowError if it cannot be one."""
        check_has_no_media(row)
        for column in self._whole_numbers & row.keys():
            row[column] = row[column] and row[column].removesuffix(".0")
        prompt = value_at(row, self.prompt_column) if self.prompt_column else ""
        tools = (
            next(filter(None, map(row.get, TOOL_COLUMNS)), None)
            if "{tool" not in self._config.template
            else None
        )
        if self.table.is_arrow:
            prompt, tools = without_nulls(prompt), without_nulls(tools)
        prompt = self._after_columns(prompt, row)
        demonstration = None
        if self._demonstrates:
            prompt, demonstration = self._divided(prompt, row)
        chat = isinstance(prompt, list) and not self._config.template
        text, messages = ("", prompt_messages(prompt)) if chat else (self._text(prompt, row), None)
        if messages is None:
            messages = [{"role": "user", "content": text.strip()}]
        used = (self.prompt_column, self.completion_column, *RESERVED_COLUMNS)
        left = {column: row.get(column) for column in self.columns if column not in used}
        return Example(
            text=text,
            messages=messages,
            expected_answer=self._answer(row),
            columns=left,
            tools=read_tools(tools),
            demonstration=demonstration,
        )

    def _after_columns(self, prompt: Any, row: Row) -> Any:
        """Returns the prompt after what the columns of a system message and LLaMA-Factory's `history` say, if they do."""
        joined = {name: row[name] for name in self._joined if row.get(name)}
        history = joined.pop("history", None)
        said = [
            {"role": "system", "content": joined[name]} for name in SYSTEM_COLUMNS if name in joined
        ]
        if not (said or history):
            return prompt
        asked = (
            prompt
            if isinstance(prompt, list)
            else [{"role": "user", "content": self._text(prompt, row)}]
        )
        first = [one for one in read_messages(asked[:1]) if one["role"] == "system"]
        if said and first and first != said:
            raise RowError(
                f"a system message in {self.prompt_column!r} and another in 'system'; leave out one"
            )
        said = said[len(first) :]
        for pair in history or ():
            if not isinstance(pair, list) or len(pair) != 2:
                raise RowError("'history' is no list of pairs, each a question and its answer")
            said += [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
        return said + asked

    def _divided(self, prompt: Any, row: Row) -> tuple[Any, list[Message]]:
        """Returns the row's prompt and the messages to learn from, up to the last assistant turn; [] if there are none."""
        completion = value_at(row, self.completion_column) if self.completion_column else []
        if calls := row.get("tools") and written_calls(completion):
            completion = [{"role": "assistant", "content": "", "tool_calls": calls}]
        if isinstance(completion, str):
            completion = (
                [{"role": "assistant", "content": completion}] if completion.strip() else []
            )
        if completion is None or completion != completion:  # pandas writes NaN for a missing value
            completion = []
        if not isinstance(completion, list):
            raise RowError(f"{self.completion_column!r} is neither text nor a list of messages")
        completion = read_messages(without_nulls(completion) if self.table.is_arrow else completion)
        if completion and completion[0]["role"] in ("system", "developer", "user"):
            prompt, completion = self._apart(prompt, completion)
        if not isinstance(prompt, list):
            return prompt, completion
        whole = read_messages([*prompt, *completion])
        turns = [place for place, message in enumerate(whole) if message["role"] == "assistant"]
        if not turns:
            return prompt, []
        least = len(prompt) if self.completion_column else 0
        learned = [place for place in turns if place >= least][
            0 if self._config.demonstrations == "all" else -1 :
        ]
        begin = learned[0] if learned else len(prompt)
        if learned and begin and whole[begin - 1]["role"] == "assistant":
            raise RowError(
                "two messages of the assistant's in a row, of which the second answers nothing; join them"
            )
        says_nothing = any(
            not (whole[place].keys() & {*REASONING, "tool_calls"} or _said(whole[place])[1])
            for place in learned
        )
        return whole[:begin], [] if says_nothing else whole[begin : turns[-1] + 1]

    def _apart(self, prompt: Any, whole: list[Message]) -> tuple[list[Message], list[Message]]:
        """Returns the prompt and what follows it, of a completion that repeats the prompt, as those of preference pairs."""
        asked = read_messages(
            prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        )
        for begin in range(len(whole) - len(asked)):
            end = begin + len(asked)
            if [_said(one) for one in whole[begin:end]] == [_said(one) for one in asked]:
                return whole[:end], whole[end:]
        raise RowError(
            f"{self.completion_column!r} does not begin with the assistant's turn or with {self.prompt_column!r}"
        )

    def _text(self, prompt: Any, row: Row) -> str:
        if self._config.template:
            try:
                return self._config.template.format(**row)
            except KeyError as error:  # a column that other rows have
                raise RowError(f"no column {error} for task.template") from error
            except (ValueError, AttributeError, TypeError, IndexError) as error:
                raise RowError(f"task.template cannot be filled: {error}") from error
        if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
            raise RowError(f"no {self.prompt_column!r}")
        if isinstance(prompt, str) and not is_text(prompt):
            raise RowError(f"{self.prompt_column!r} {_NO_UTF8}")
        if not is_text(prompt):
            raise RowError(f"{self.prompt_column!r} is neither text nor a list of messages")
        for name in ("input", "context"):
            if name in self._joined and is_text(row.get(name)) and row[name].strip():
                prompt = f"{prompt}\n\n{row[name]}"
        if re.match(r'\s*\[\s*\{\s*["\'](role|content)["\']', prompt):
            raise RowError(
                f"{self.prompt_column!r} is text that lists messages; write a list, in JSON or Parquet"
            )
        return prompt

    def _answer(self, row: Row) -> str:
        """Returns the row's answer as text, "" if it has none; all that it accepts with OR between them."""
        given = value_at(row, self.answer_column) if self.answer_column else None
        answers = [self._read(one) for one in (given if isinstance(given, list) else [given])]
        accepted = dict.fromkeys(filter(None, answers))
        if None in answers and not accepted:
            is_number = self._config.answer_kind == "number"
            expected = ": expected a number alone, with a point before decimals" * is_number
            raise _UnreadableAnswer(
                f"no answer that can be read in {self.answer_column!r}{expected}"
            )
        return OR.join(accepted)

    def _read(self, given: Any) -> str | None:
        """Returns one answer as text, "" if it is empty, None if the task does not read it."""
        answer = self.table.label(self.answer_column, given)
        if (
            answer is None or answer != answer or str(answer).strip() == ""
        ):  # pandas writes NaN for a missing value
            return ""
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        if not isinstance(answer, str | Real | Decimal):
            inside = next(iter(answer)) if isinstance(answer, dict) else 0
            remedy = f"; name what is inside, such as {self.answer_column}.{inside}" * isinstance(
                answer, dict
            )
            raise RowError(f"{self.answer_column!r} is neither text nor a number{remedy}")
        if not is_text(str(answer)):
            raise RowError(f"{self.answer_column!r} {_NO_UTF8}")
        if isinstance(answer, float) and math.isinf(answer):
            raise RowError(f"{self.answer_column!r} is infinite")
        if self._config.answer_kind == "tag" and last_tagged(str(answer)) is not None:
            raise RowError(
                f"{self.answer_column!r} has <answer> tags itself; write what is between them"
            )
        return self._read_answer(str(answer))


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
        inside = [value_at(one, inner) for one in value if isinstance(one, dict)]
        several = any(one is not None for one in inside)
        value = {inner: inside} if several else {str(place): one for place, one in enumerate(value)}
    return value_at(value, inner) if isinstance(value, dict) and inner else None


def _last_role(value: Any) -> str:
    """Returns the role of the last of a list of messages, "" for any other value."""
    last = value[-1] if isinstance(value, list) and value else None
    return str(last.get("role", last.get("from", ""))) if isinstance(last, dict) else ""


def _said(message: Message) -> tuple[str, str]:
    return message["role"], message["content"].strip()


def _key(*parts: Any) -> int:
    """Returns a 64-bit hash of texts and messages."""
    content = json.dumps(parts, default=str)  # Parquet has dates
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")


def _count(num: int) -> str:
    return f"{num:,} row{'s' * (num != 1)}"


def _rows(numbers: list[str]) -> str:
    """Returns at most ten row numbers as text. Example: "rows 3, 7"."""
    more = ", ..." if len(numbers) > _NUM_SHOWN else ""
    return f"row{'s' * (len(numbers) > 1)} {', '.join(numbers[:_NUM_SHOWN])}{more}"
