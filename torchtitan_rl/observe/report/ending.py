"""The page's headline: how a run ended, or how far it has come."""

from datetime import UTC, datetime
from typing import Any

from torchtitan_rl.observe.report.load import Run

ERROR_LINES = 8
"""Lines of an error in the headline."""


def ending(run: Run) -> dict[str, Any]:
    """How the run ended, for the page's headline.

    Returns: level; text: one sentence; error: what the error says, "" if there is none; details: the whole message; failed: the step
    that failed and the count of its samples, None if there are none.
    """
    steps = [row["step"] for row in run.rows if row.get("unfinished")]
    return {**_headline(run), "failed": {"step": steps[0], "count": len(steps)} if steps else None}


def _headline(run: Run) -> dict[str, Any]:
    end, steps = run.end, _steps_of(run)
    if end is None:
        text = f"{steps}: no end is recorded. It goes on, or its machine or container was ended"
        return {"level": "plain", "text": text, "error": "", "details": ""}
    where = f" in {end.phase.replace(': ', ', ')}" if end.phase else ""
    where += f" (rank {end.rank})" if end.rank else ""
    text = {
        "done": f"Done: {steps}",
        "evaluated": f"Evaluated after {steps}"
        if any(run.steps)
        else "Evaluated, without training",
        "stopped": f"Stopped{where}: {steps}",
        "failed": f"Failed{where}: {steps}",
        "killed": f"Killed{where}: {steps}",
        "hung": f"Ended by the watchdog{where}: {steps}",
    }.get(end.outcome, f"{end.outcome}{where}: {steps}")
    level = {"done": "good", "evaluated": "good", "stopped": "warn"}.get(end.outcome, "bad")
    if level == "warn" and not end.message.startswith("SIG"):
        level = "bad"  # training stopped itself
    said = _said(end.message).splitlines()
    error = "\n".join(said[:ERROR_LINES])
    whole = len(said) <= ERROR_LINES and not end.message.startswith("Traceback")
    return {"level": level, "text": text, "error": error, "details": "" if whole else end.message}


def _when(run: Run) -> str:
    times = [time for time in run.times if time is not None]
    return (
        f", the last at {datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M} UTC"
        if times
        else ""
    )


def _said(message: str) -> str:
    """The part of an error's message to read first: after a traceback's last frame; else all of it."""
    lines = message.splitlines()
    frames = [place for place, line in enumerate(lines) if line.startswith('  File "')]
    if not frames or not message.startswith("Traceback"):
        return message.removeprefix("error: ").removeprefix("stopped: ").strip()
    after = frames[-1] + 1
    while after < len(lines) and lines[after].startswith("    "):  # the frame's code and its marks
        after += 1
    return "\n".join(lines[after:]).strip() or message


def _steps_of(run: Run) -> str:
    """Example: "7 of 50 steps in 1 min 3 s, the last at 2026-11-22 17:40 UTC"."""
    if not run.steps:
        return "no step was recorded"
    last, total = run.steps[-1], run.total_steps
    worked = run.worked_s()
    span = "" if worked is None else f" in {_duration(worked)}"
    of = f" of {total}" if total is not None and last < total else ""
    return f"{last}{of} {'step' if last == 1 and not of else 'steps'}{span}{_when(run)}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds} s"
        if minutes
        else f"{seconds} s"
    )
