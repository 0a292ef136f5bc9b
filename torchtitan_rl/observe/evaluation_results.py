"""Evaluation results: metrics and wrong answers, written to a JSON file and printed as a table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl import comm
from torchtitan_rl.errors import TrainingStopped
from torchtitan_rl.events import progress
from torchtitan_rl.types import Episode, Group

NUM_FAILURES = 20
"""Wrong answers stored for each pass."""


def failures_of(groups: Sequence[Group[Episode]]) -> list[dict[str, Any]]:
    """The wrong answers of an evaluation's pass as plain values, at most NUM_FAILURES."""
    failures = []
    for group in groups:
        for episode in group.samples:
            if episode.scored.correct is False and len(failures) < NUM_FAILURES:
                failure = {
                    "prompt": group.prompt.text,
                    "expected_answer": group.prompt.expected_answer,
                    "answer": episode.scored.answer,
                    "completion": episode.completion.text,
                    "finish_reason": episode.completion.finish_reason,
                }
                failures.append(failure)
    return failures


def write_results(folder: Path, step: int, results: Mapping[str, Any]) -> Path:
    """Writes `folder`/step-N.json, all of it or nothing, and returns its path. Equal results give equal files."""
    file = folder / f"step-{step}.json"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".writing")
    try:
        unfinished.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    except OSError:
        for rest in (unfinished, file):  # an earlier evaluation's file would pass for this one's
            rest.unlink(missing_ok=True)
        raise
    return unfinished.replace(file)


def print_results_of(run_folder: Path, step: int) -> None:
    """Prints, on rank 0, the results that `write_results` wrote to the run folder for `step`.

    Raises:
        TrainingStopped: if they were not written, as on a full disk.
    """
    if comm.is_rank_0():
        file = run_folder / "evaluation" / f"step-{step}.json"
        if not file.exists():
            raise TrainingStopped(
                f"the evaluation's results could not be written to {file}. Make room and start it again."
            )
        print_results(json.loads(file.read_text()))
        progress(f"results: {file}")


def print_results(results: Mapping[str, Any]) -> None:
    """Prints the measures, with 95 % intervals where there are any, and up to five wrong answers."""
    from torchtitan_rl.observe.panels import (
        evaluation_measures,
        metric_table,
        plain_console,
        sample_panel,
    )

    console = plain_console()
    console.print(metric_table(evaluation_measures(results["metrics"]), console))
    for failure in next(iter(results["failures"].values()), [])[:5]:
        row = {"response": failure["completion"], **failure, "select_reason": "wrong"}
        del row["completion"]
        console.print(sample_panel(row, console))
