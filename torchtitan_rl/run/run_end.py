"""How a run ended, in a small file of its folder (end.json). The report's headline is made from it.

The first process that knows the cause writes the file: the rank that failed, rank 0 of a run that is complete, or the launcher
for a rank that was killed or that hung. Later ones leave it as it is.
"""

import errno
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torchtitan_rl.events import PHASE, progress
from torchtitan_rl.fields.references import users_frames
from torchtitan_rl.observe.line_file import name_first
from torchtitan_rl.run.secrets import without_secrets
from torchtitan_rl.text import head_and_tail

END, LOCK = "end.json", "run.lock"
REPORT = "report.html"
MOST_CHARACTERS = 20_000
"""Longer error messages are cut in the middle."""
MEMORY_REMEDY = (
    "Lower trainer.max_tokens_per_microbatch, num_prompts_per_step, sampling.n, grader.workers or, on a CPU, VLLM_CPU_KVCACHE_SPACE "
    "(GiB a rank), or start fewer ranks on a node."
)
ENGINE_REMEDIES = {
    "less than desired GPU memory utilization": "Lower generator.gpu_memory_utilization, or end what else uses this GPU.",
    "Try increasing `gpu_memory_utilization`": (
        "The engine's share of memory does not hold its weights and one sequence. Raise generator.gpu_memory_utilization (on a CPU "
        "VLLM_CPU_KVCACHE_SPACE) or generator.tensor_parallel_degree, or lower sampling.max_tokens."
    ),
}
"""What to do by vLLM's words, where its start finds too little memory."""

Outcome = Literal["done", "evaluated", "stopped", "failed", "killed", "hung"]
"""done: all that was to be done; evaluated: --eval-only; stopped: by a signal, or by training itself; failed: an error; killed: a
rank was ended by a signal; hung: the watchdog ended the job."""


def phase_of(error: BaseException) -> str:
    """The phase in which an error, or the error that caused it, was raised. Example: "step 3: grade"; "" outside of phases."""
    phase, cause, seen = "", error, set()
    while cause is not None and id(cause) not in seen:  # `raise error from error` is its own cause
        seen.add(id(cause))
        phase = getattr(cause, PHASE, phase)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return phase


def write_end(
    folder: Path,
    outcome: Outcome,
    message: str = "",
    *,
    error: str = "",
    code: int = 0,
    rank: int | None = None,
    phase: str = "",
) -> None:
    """Write how the run ended, unless this start has written it already. Never raises: a full disk may be why the run ends.

    Args:
        message: why, for a person; the error with its traceback if it was unforeseen. Secrets are masked.
        error: the same without the traceback, to be read first.
        code: the exit code.
        phase: where the rank failed, such as "step 3: grade".
    """
    content = {
        "outcome": outcome,
        "error": head_and_tail(without_secrets(error), MOST_CHARACTERS),
        "message": head_and_tail(without_secrets(message), MOST_CHARACTERS),
        **{"code": code, "rank": rank, "phase": phase, "time": time.time()},
        "start": start_token(folder),
    }
    forget_earlier_end(folder)
    unfinished = folder / f".{END}.{os.getpid()}"
    with suppress(OSError):
        unfinished.write_text(json.dumps(content, indent=1) + "\n", "utf-8", "backslashreplace")
        name_first(unfinished, folder / END)


def has_report(folder: Path) -> bool:
    """Whether the report was written after the run's end."""
    report, end = folder / REPORT, folder / END
    return report.exists() and end.exists() and report.stat().st_mtime >= end.stat().st_mtime


def start_token(folder: Path) -> str:
    """What the newest start has written into the folder's lock, another text each time; "" if it cannot be read."""
    try:
        return (folder / LOCK).read_text()
    except OSError:
        return ""


def forget_earlier_end(folder: Path) -> None:
    """Remove an end that is not of the folder's newest start. Their times do not tell: clocks may be set back."""
    with suppress(OSError):
        if start_token(folder) not in (folder / END).read_text(errors="replace"):
            (folder / END).unlink()


def write_run_report(folder: Path) -> None:
    """Write the report of a run whose config wants one. Logs a warning if that fails."""
    path = folder / REPORT
    try:
        config = json.loads((folder / "config.json").read_text())
        if config.get("metrics", {}).get("report", True):
            from torchtitan_rl.observe import report  # only needed at the end of the run

            report.write_report(folder, path)
            progress(f"report: {path}")
    except Exception as error:
        message = f"the report could not be written ({error}); python -m torchtitan_rl.observe.report tries again"
        # A full disk or a deleted folder needs no traceback.
        shown = None if isinstance(error, OSError) else error
        logging.getLogger(__name__).warning(message, exc_info=shown)


def advice(error: BaseException) -> list[str]:
    """The last line of the traceback in the user's code, such as a reward function, and the settings to change if memory ran out."""
    import torch

    lines: list[str] = []
    if frames := users_frames(error):
        place = f"{frames[-1].filename}, line {frames[-1].lineno}"
        lines.append(f"The last line of your own code in it: {place}")
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if refused or isinstance(error, MemoryError | torch.OutOfMemoryError):
        phase = phase_of(error)
        where = f" in {phase}" if phase else ""
        lines.append(f"This process was refused memory{where}. {MEMORY_REMEDY}")
    lines += [remedy for words, remedy in ENGINE_REMEDIES.items() if words in str(error)]
    return lines
