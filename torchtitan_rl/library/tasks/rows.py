"""rows: any table of prompts, with or without answers. Every column reaches reward functions by its name, as in TRL."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from torchtitan_rl.core.config import number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.events import heartbeat, progress
from torchtitan_rl.library.answers import KINDS
from torchtitan_rl.library.task import (
    Example,
    Faults,
    RewardFunction,
    Task,
    check_metric_name,
    completion_text,
    shared_out,
)
from torchtitan_rl.library.tasks.row_set import RowSet
from torchtitan_rl.library.tasks.table import Table, load_table


class Rows(Task):
    """Examples from the rows of a table, shuffled anew in each epoch.

    What cannot be an example is told with the numbers of its rows before training: an error where the file must be mended,
    a line of output where rows are left out (repeated prompts, missing answers, prompts that are also held out).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        path: str = ""
        """A file (.jsonl, .json, .csv, .tsv, .parquet), a folder of such files, or the name of a data set on the hub."""

        subset: str = ""
        """The configuration of a data set on the hub that has several, such as "main" of openai/gsm8k."""

        split: str = "train"
        """The split to train on, of a data set on the hub or of a folder with files such as train.jsonl."""

        held_out_path: str = ""
        """Rows to evaluate on, as `path`. Empty: see held_out_split."""

        held_out_paths: dict[str, str] = field(default_factory=dict)
        """Several tables to evaluate on, each by a name: the prompts are shared out evenly, and besides the metrics of all
        there are evaluation/<name>/... of each."""

        held_out_split: str = ""
        """The split of held_out_path(s), or of `path`, to evaluate on. Empty as held_out_path is: a share of the rows."""

        held_out_share: float = number(0.05, above=0, below=1)
        """The share of the rows, at least one, that is held out where there is neither file nor split for it. Which ones
        depends on their prompts and held_out_seed alone."""

        held_out_seed: int = number(0, least=0)
        """Chooses another share."""

        prompt_column: str = ""
        """Holds the prompt: a text, or chat messages that end with the user's. Empty: the first there is of prompt,
        messages, question, problem."""

        template: str = ""
        """The prompt's text made of the row's columns, such as "Question: {question}\\nAnswer:". Empty: the column alone."""

        answer_column: str = ""
        """Holds the right answer, a text or a number. Empty: the first there is of answer, expected_answer, ground_truth;
        without any, reward functions (grader.rewards) judge alone."""

        answer_kind: Literal["text", "tag", "number"] = "text"
        """What a completion's answer is and when it is right. text: all of it, the same text; tag: what <answer>...</answer>
        holds, the same text; number: its last number, of the same value."""

    def __init__(self, config: Config) -> None:
        self.config = config
        table = load_table(config.path, subset=config.subset, split=config.split)
        self._train = self._part(table)
        self._held_out = self._held_out_parts()
        there = f"rows for training and held-out ones, but: {self._train.describe('for training')}"
        remedy = "Give more rows with prompts of their own, or a file to hold out (task.held_out_path)."
        expect(len(self._train.kept) > 0, "task.path", config.path, there, remedy)

    @property
    def has_answers(self) -> bool:
        """Whether rows have an answer to judge by."""
        return bool(self._train.answer_column)

    def train_example(self, index: int, *, seed: int) -> Example:
        """The example at place `index`: the rows in an order that depends on the seed and the epoch."""
        epoch, place = divmod(index, len(self._train.kept))
        return self._train.example(_order(len(self._train.kept), seed, epoch)[place])

    def held_out_examples(self, num: int) -> list[Example]:
        """The first `num` held-out rows, of several tables each one's first num / tables, or as many as there are."""
        return [
            replace(part.example(place), task=name)
            for (name, part), share in zip(self._held_out.items(), shared_out(num, len(self._held_out)), strict=True)
            for place in range(min(share, len(part.kept)))
        ]

    def members(self) -> dict[str, Task]:
        """Itself, also by the names of several held-out tables, which the metrics of each go by."""
        return {"": self, **dict.fromkeys(self._held_out, self)}

    def epoch(self, num_seen: int) -> float:
        return num_seen / len(self._train.kept)

    def leave_out(self, faults: Faults) -> None:
        held_out = [(part, f"held out as {name}" if name else "held out") for name, part in self._held_out.items()]
        for part, what in [(self._train, "for training"), *held_out]:
            with heartbeat(f"tokenise the prompts of {part.table.name}"):
                found = [fault or "" for examples in part.batches() for fault in faults(examples)]
            for reason in sorted(set(found) - {""}):
                part.leave_out_where(np.array(found) == reason, reason)
                found = [fault for fault in found if fault != reason]
            progress(part.describe(what))
            expect(
                len(part.kept) > 0, "task.path", self.config.path, f"rows {what}, but none can be a prompt",
                "Raise prompts.max_prompt_tokens, or mend the rows.",
            )  # fmt: skip

    def reward_functions(self) -> Sequence[RewardFunction]:
        """`correct` where rows have an answer, else none of its own."""
        return (self.correct,) if self.has_answers else ()

    def correct(self, *, completions: list, expected_answer: list[str], **_: Any) -> list[float]:
        """1 for the right answer, else 0."""
        answers = [self.extract_answer(completion_text(completion)) for completion in completions]
        return [float(self.is_correct(a, expected)) for a, expected in zip(answers, expected_answer, strict=True)]

    def extract_answer(self, text: str) -> str | None:
        return KINDS[self.config.answer_kind].extract(text)

    def is_correct(self, answer: str | None, expected_answer: str) -> bool:
        return answer is not None and KINDS[self.config.answer_kind].equal(answer, expected_answer)

    def judge(self, answer: str | None, prompt: Any) -> bool | None:
        """None where rows have no answers."""
        return super().judge(answer, prompt) if self.has_answers else None

    def expected_answer(self, text: str) -> str | None:
        """The answer in a row's answer column; None where it holds none. Override it where the column holds more."""
        return (
            text if KINDS[self.config.answer_kind].equal(text, text) else None
        )  # a text that no number equals is none

    def _held_out_parts(self) -> dict[str, RowSet]:
        """What is held out, by its name; training keeps none of it."""
        config = self.config
        one = config.held_out_path or (config.held_out_split and config.path)
        expect(
            not (one and config.held_out_paths), "task.held_out_path", one, "nothing, as task.held_out_paths names tables",
            "Name all in held_out_paths.",
        )  # fmt: skip
        for name in config.held_out_paths:
            check_metric_name(name, "task.held_out_paths")
        paths = config.held_out_paths or ({"": one} if one else {})
        if not paths:
            return {"": self._train.split_off(config.held_out_share, config.held_out_seed)}
        parts = {}
        for name, path in paths.items():
            field = f"task.held_out_paths {name}" if name else "task.held_out_path"
            split = config.held_out_split or "train"
            parts[name] = self._part(load_table(path, subset=config.subset, split=split, field=field))
            self._train.leave_out_where(np.isin(self._train.keys, parts[name].keys), "also held out")
        return parts

    def _part(self, table: Table) -> RowSet:
        with heartbeat(f"read {table.name}"):
            return RowSet(table, self.config, self.expected_answer)


@functools.lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] the places of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
