"""Evaluation results: metrics and wrong answers, written to a JSON file and printed as a table."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl import comm
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.events import progress
from torchtitan_rl.observe.line_file import without_nan
from torchtitan_rl.text import plain
from torchtitan_rl.types import Episode, Group

logger = logging.getLogger(__name__)

NUM_FAILURES = 20
"""Wrong answers stored for each pass."""


def failures_of(groups: Sequence[Group[Episode]]) -> list[dict[str, Any]]:
    """The wrong answers of an evaluation's pass as plain values, at most NUM_FAILURES."""
    failures = [
        {
            "prompt": (episode.completion.prompt or group.prompt).text,
            "messages": (episode.completion.prompt or group.prompt).messages,
            "expected_answer": group.prompt.expected_answer,
            "answer": episode.scored.answer,
            "completion": episode.completion.text,
            "finish_reason": episode.completion.finish_reason,
        }
        for group in groups
        for episode in group.samples
        if episode.scored.correct is False
    ]
    return plain(failures[:NUM_FAILURES])


def results_folder(run_folder: Path, *, alone: bool) -> Path:
    """The folder of a run's results. Those of an evaluation alone (`eval_only`) replace none of the run's own."""
    return run_folder / "evaluation" / ("alone" if alone else "")


def write_results(folder: Path, step: int, results: Mapping[str, Any]) -> None:
    """Writes step-N.json in the folder, all of it or nothing. Equal results give equal files.

    A full disk does not end the run: the metrics are also in the step's record.
    """
    file = folder / f"step-{step}.json"
    unfinished = file.with_suffix(".writing")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(without_nan(results), indent=2, ensure_ascii=False)
        unfinished.write_text(f"{text}\n", "utf-8", "backslashreplace")
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):  # an earlier evaluation's file would pass for this one's
            for rest in (unfinished, file):
                rest.unlink(missing_ok=True)
        logger.warning(f"{file} is not written: {error}; the run continues without it")


def print_results(folder: Path, step: int) -> None:
    """Prints, on rank 0, what `write_results` wrote: the measures, with 95 % intervals, and up to five wrong answers.

    Raises TrainingStopped if there is nothing, as on a full disk.
    """
    from torchtitan_rl.observe.panels import (
        evaluation_measures,
        metric_table,
        plain_console,
        sample_panel,
    )

    if not comm.is_rank_0():
        return
    file = folder / f"step-{step}.json"
    if not file.exists():
        remedy = "Make room and start it again."
        raise TrainingStopped(f"the evaluation's results could not be written to {file}. {remedy}")
    results, console = json.loads(file.read_text("utf-8")), plain_console()
    console.print(metric_table(evaluation_measures(results["metrics"]), console))
    for failure in next(iter(results["failures"].values()), [])[:5]:
        row = {"response": failure.pop("completion"), **failure, "select_reason": "wrong"}
        console.print(sample_panel(row, console))
    progress(f"results: {file}")
