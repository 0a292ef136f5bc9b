"""rows: any table of prompts, with or without answers. Reward functions receive every column by name, as in TRL."""

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from torchtitan_rl.data.answer_kinds import KINDS, TAG, TAG_REQUEST, KindName, chosen_kind
from torchtitan_rl.data.answers import OR, equal_words, final_answer, marked, without_unit
from torchtitan_rl.data.row_reader import ANSWER_COLUMNS, RowReader, row_count
from torchtitan_rl.data.row_set import RowSet
from torchtitan_rl.data.table import RowError, Table, is_quick, load_table
from torchtitan_rl.data.task import (
    Example,
    Faults,
    RewardFunction,
    Task,
    check_metric_name,
    shared_out,
)
from torchtitan_rl.errors import expect
from torchtitan_rl.events import heartbeat, progress
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.references import from_caller
from torchtitan_rl.text import strings

_NUM_JUDGED = 1000
"""Rows from which answer_kind "auto" is chosen, the first of the table."""
_DECIMAL_COMMA = re.compile(r"[-+\u2212]?(?:0,\d+|\d+,(?!\d{3}$)\d+|\d[\d.]*\.\d+,\d+)")
_WITH_COMMA, _MOST_WITH_COMMA = "with a decimal comma, such as 3,5", 0.01
"""Why a row is left out, and the share of such rows above which 3,125 and 1.200 in others are not safe to read."""
_REMEDY = "Correct the rows that are left out, or what they name, or add rows with other prompts."


class Rows(Task):
    """Examples from the rows of a table, reshuffled in each epoch.

    Rows that cannot be read, with repeated prompts, without answers or with held-out prompts are left out and listed.
    """

    answer_columns: ClassVar[tuple[str, ...]] = ANSWER_COLUMNS
    """Columns that may have the answer, the first one first."""

    identity_columns: ClassVar[tuple[str, ...]] = ()
    """Columns by which rows with the same prompt are different tasks. Without any, the first such row is kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        path: str = ""
        """A file (.jsonl, .json, .csv, .tsv, also compressed, or .parquet), a folder of such files, or the name of a data
        set on the Hugging Face hub."""

        subset: str = ""
        """Configuration of a data set that has several, on the hub or in folders, such as "main" for openai/gsm8k."""

        split: str = "train"
        """Split to train on, in a data set on the hub or in a folder with files such as train.jsonl."""

        held_out_path: str = ""
        """Rows to evaluate on, in the same forms as `path`. Empty: see held_out_split."""

        held_out_paths: dict[str, str] = field(default_factory=dict)
        """Several tables to evaluate on, by name. Each provides the same number of prompts and also gets its own
        metrics, evaluation/<name>/..."""

        held_out_split: str = ""
        """Split to evaluate on, in held_out_path(s) or else in `path`. If held_out_path is empty too, a share of the
        training rows is held out."""

        held_out_share: float | Literal["auto"] = number("auto", above=0, below=1)
        """Share of the rows to hold out, at least one row, if there is no held-out path or split. auto: 5 %, or 16 rows if that
        is more, but no more than a quarter. The choice depends only on the prompts and held_out_seed."""

        held_out_seed: int = number(0, least=0)
        """Seed for the choice of held-out rows."""

        prompt_column: str = ""
        """Column with the prompt: text, or chat messages that end with a user message. Empty: the first existing one of
        prompt, messages, question, problem, conversations, conversation, query, instruction."""

        template: str = ""
        """Format string that builds the prompt from the row's columns, such as "Question: {question}\\nAnswer:". Empty:
        use the prompt column as it is."""

        demonstrations: Literal["none", "last", "all"] = "none"
        """Completions of the rows to learn from (algorithm.loss Nll), which the rows have in a completion column, or in
        messages that end with the assistant. last: the last assistant turn. all: every assistant turn. none: the policy
        samples the completions."""

        completion_column: str = ""
        """With demonstrations: column with the completion, text or the messages that follow the prompt's. Empty: the first
        existing one of completion, response, chosen, and output of an instruction; else the prompt column's messages have it."""

        answer_column: str = ""
        """Column with the right answer, text, a number, or a list of which any is right; a dotted name, such as reward_model.ground_truth, looks into an
        object or its JSON text. Empty: the first existing one of answer, expected_answer, ground_truth. Without an answer column, only the reward functions in grader.rewards judge."""

        answer_kind: Literal["auto", KindName] = "auto"
        """The answer in a completion. text: all of it, or the final answer in it. tag: the content of the last
        <answer>...</answer>, which prompts that do not name the tag are given a request for. box: the content of the last
        \\boxed{}. number: the last number, by value. choice: the letter that the final answer begins with. math: LaTeX in the
        final answer. auto: tag if the prompts ask for it, else number, choice, math or text, by the expected answers."""

        def check_files(self) -> None:
            """Raise UserError if small files of rows, or names that are no files, cannot be used."""
            paths = filter(None, [self.held_out_path, *self.held_out_paths.values()])
            if all(map(is_quick, [self.path, *paths])):
                self.build()

    def __init__(self, config: Config) -> None:
        self.config = config
        table = self.table(config.path, split=config.split, field="task.path")
        reader = self._reader(table)
        progress(reader.summary())
        if config.answer_kind == "auto":
            self.config = replace(config, answer_kind="text")  # the choice reads any answer
            self.config = replace(config, answer_kind=self._chosen_kind(reader))
        self._train = self._part(reader)
        self._held_out = self._held_out_parts()
        there = f"rows for training and held-out rows, but: {self._train.describe('for training')}"
        remedy = f"{_REMEDY} Other columns are named with --task.prompt-column and --task.answer-column: {reader.columns}."
        if reader.demonstrates and not reader.completion_column:
            columns = f"one of {reader.columns}"
            remedy = f"Name the column to learn with --task.completion-column: {columns}."
        expect(len(self._train.kept) > 0, "task.path", config.path, there, remedy)

    def table(self, path: str, *, split: str, field: str) -> Table:
        """Returns the rows of a path that the config's `field` names. Override it to read others than `load_table`."""
        return load_table(path, subset=self.config.subset, split=split, field=field)

    @property
    def has_answers(self) -> bool:
        """Whether the training table has an answer column."""
        return bool(self._train.reader.answer_column)

    def train_example(self, index: int, *, seed: int) -> Example:
        """Returns the example at `index` of the stream. The order of the rows depends on the seed and the epoch."""
        epoch, place = divmod(index, len(self._train.kept))
        return self._train.example(row_order(len(self._train.kept), seed, epoch)[place])

    def held_out_examples(self, num: int) -> list[Example]:
        """Returns the first `num` held-out rows, or all if there are fewer, which it says; num / tables from each table."""
        shares = shared_out(num, len(self._held_out))
        examples = [
            replace(part.example(place), task=name)
            for (name, part), share in zip(self._held_out.items(), shares, strict=True)
            for place in range(min(share, len(part.kept)))
        ]
        if 0 < len(examples) < num:
            remedy = "add rows to them"
            if any(part.table is self._train.table for part in self._held_out.values()):
                share = min(0.5, num / (len(examples) + len(self._train.kept)))
                remedy = f"hold out more with --task.held-out-share {share:.2g}, or name rows with --task.held-out-path"
            progress(
                f"evaluations have {row_count(len(examples))}, each {1 / len(examples):.1%} of the accuracy; for a finer curve {remedy}"
            )
        return examples

    def members(self) -> dict[str, Task]:
        """Returns itself under "" and under each held-out table's name, so that each table gets its own metrics."""
        return {"": self, **dict.fromkeys(self._held_out, self)}

    def epoch(self, num_seen: int) -> float:
        return num_seen / len(self._train.kept)

    def leave_out(self, faults: Faults) -> None:
        """Leaves out rows that cannot be used. Raises UserError if a table keeps none."""
        parts = {"for training": self._train}
        for name, part in self._held_out.items():
            parts[f"held out as {name}" if name else "held out"] = part
        for what, part in parts.items():
            with heartbeat(f"tokenize the prompts of {part.table.name}"):
                reasons = [fault or "" for examples in part.batches() for fault in faults(examples)]
            for reason in sorted({*reasons} - {""}):
                part.leave_out_where(np.array([each == reason for each in reasons]), reason)
                reasons = [other for other in reasons if other != reason]
            progress(part.describe(what))
            expected = f"rows {what}, but: {part.describe(what)}"
            expect(len(part.kept) > 0, "task.path", self.config.path, expected, _REMEDY)

    def reward_functions(self) -> Sequence[RewardFunction]:
        """Returns `correct` if the rows have answers, else nothing."""
        return (self.correct,) if self.has_answers else ()

    def correct(self, /, *, completions: list, expected_answer: list[str], **_: Any) -> list[float]:
        """1 for the right answer, else 0."""
        answers = map(self.answer, completions)
        return [
            float(self.is_correct(a, expected))
            for a, expected in zip(answers, expected_answer, strict=True)
        ]

    def extract_answer(self, text: str) -> str | None:
        return KINDS[self.config.answer_kind].extract(text)

    def is_correct(self, answer: str | None, expected_answer: str) -> bool:
        accepted = () if answer is None else expected_answer.split(OR)
        return any(self.equal(answer, each) for each in accepted)

    def equal(self, answer: str, expected_answer: str) -> bool:
        return KINDS[self.config.answer_kind].equal(answer, expected_answer)

    def answer_request(self, prompt: str) -> str:
        """Returns a request for tags, if they are read and the prompt has none. A template or a warm_start says how it is asked."""
        config = self.config
        is_asked = TAG in prompt or config.template or config.warm_start
        return TAG_REQUEST if config.answer_kind == "tag" and not is_asked else ""

    def judge(self, answer: str | None, prompt: Any) -> bool | None:
        """Returns whether the answer is right, or None if the rows have no answers."""
        return super().judge(answer, prompt) if self.has_answers else None

    def shown_answer(self, answer: str, prompt: Any) -> str:
        """Returns the final answer of a text, unless all of the text is the expected one."""
        if self.config.answer_kind != "text" or any(
            equal_words(answer, accepted) for accepted in prompt.expected_answer.split(OR)
        ):
            return answer
        return final_answer(answer)

    def expected_answer(self, text: str) -> str | None:
        """Returns the answer in a row's answer column, or None if it is invalid. Override it to parse the column.

        That of a solution is what follows the #### at its end, "He has 2.\n#### 2", or what its last \\boxed{} or <answer> holds.
        """
        last_line = re.search(r"^####[^\S\n]*([^\n]+)$\s*\Z", text, re.MULTILINE)
        text = last_line[1].strip() if last_line else marked(text) or text
        if self.config.answer_kind == "number":
            text = without_unit(text)
            if _DECIMAL_COMMA.fullmatch(text):
                raise RowError(_WITH_COMMA)
        # As a number, "abc" does not even equal itself.
        return text if KINDS[self.config.answer_kind].equal(text, text) else None

    def _held_out_parts(self) -> dict[str, RowSet]:
        """Returns the held-out sets by name, and leaves their prompts out of training."""
        config = self.config
        path, paths = config.held_out_path, config.held_out_paths
        expected = "nothing, because task.held_out_paths is set"
        remedy = "Name all tables in held_out_paths."
        expect(not (path and paths), "task.held_out_path", path, expected, remedy)
        for name in paths:
            check_metric_name(name, "task.held_out_paths")
        if not paths and (path or self._split_held_out(config.path)):
            paths = {"": path or config.path}
        if not paths:
            total, share = len(self._train.kept), config.held_out_share
            num = max(0.05 * total, min(16, total / 4)) if share == "auto" else share * total
            return {"": self._train.split_off(round(num), config.held_out_seed)}
        parts = {}
        for name, path in paths.items():
            field = f"task.held_out_paths {name}" if name else "task.held_out_path"
            split = self._split_held_out(path) or "train"
            table = self.table(path, split=split, field=field)
            part = parts[name] = self._part(self._reader(table))
            there = f"rows that can be used, but: {part.describe('held out')}"
            expect(len(part.kept) > 0, field, path, there, _REMEDY)
            has_answers = bool(part.reader.answer_column)
            expected = "an answer column, as the training rows have one"
            remedy = "Name it like theirs."
            expect(has_answers or not self.has_answers, field, path, expected, remedy)
            is_held_out = np.isin(self._train.keys, part.keys)
            self._train.leave_out_where(is_held_out, "also held out")
        return parts

    def _split_held_out(self, path: str) -> str:
        """Returns the split of the held-out rows in `path`, or "".

        A task's own default is for its data set on the hub. One file has no splits.
        """
        split = self.config.held_out_split
        defaults = {field.name: field.default for field in fields(self.config)}
        is_file = Path(from_caller(path)).is_file()
        return "" if is_file and split == defaults["held_out_split"] else split

    def _chosen_kind(self, reader: RowReader) -> KindName:
        """Returns the kind of answers that the first rows show, and says so."""
        shown = []
        for row in islice(reader.table, _NUM_JUDGED):
            with suppress(RowError):  # a row that is left out
                example = reader.example(row)
                shown.append((" ".join(strings(example.messages)), example.expected_answer))
        kind, why = chosen_kind([(prompt, answer) for prompt, answer in shown if answer])
        if reader.answer_column and type(self).extract_answer is Rows.extract_answer:
            progress(why)
        return kind

    def _reader(self, table: Table) -> RowReader:
        with heartbeat(f"read the columns of {table.name}"):
            return RowReader(table, self.config, self.expected_answer, self.answer_columns)

    def _part(self, reader: RowReader) -> RowSet:
        with heartbeat(f"read {reader.table.name}"):
            rows = RowSet(reader, self.identity_columns)
        with_comma = len(rows.left_out.get(_WITH_COMMA, ()))
        expect(
            with_comma <= _MOST_WITH_COMMA * (with_comma + len(rows.kept)), "task.answer_kind", "number",
            f"decimal points, but {with_comma:,} answers of {reader.table.name} have commas, as 3,5: so 3,125 and 1.200 would be misread as 3125 and 1.2",
            "Write 3.5, 3.125 and 1200 in the file, or use --task.answer-kind text.",
        )  # fmt: skip
        return rows


@functools.lru_cache(maxsize=4)
def row_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns [num_rows] the order of the rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
