"""What the overview says in words: how the run ended, and the figures behind its curves. A line without data is omitted."""

from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torchtitan_rl.observe.report.load import HELD_OUT_SPLIT, Run

ERROR_LINES = 8
"""Lines of an error in the headline."""
CHANGES = {
    "reward/mean": ("reward", ""),
    "evaluation/loss": ("held-out loss", "nats per token"),
    "teacher/divergence": ("divergence from the teacher", "nats per token"),
    "teacher/kl_k3": ("estimated KL from the teacher", "nats per token"),
    "policy/entropy": ("entropy", "nats per token"),
    "completions/length/mean": ("completions", "tokens on average"),
}
"""Metrics of which the overview has the first and the last values: the name and the unit of each."""


class Line(NamedTuple):
    """One line of the overview.

    Example: Line("plain", "reward 0.45 → 1.14", "reward/mean")
    """

    level: Literal["plain", "warn", "bad"]
    text: str
    key: str | None = None
    """The metric that the line links to."""


def ending(run: Run) -> dict[str, Any]:
    """How the run ended, for the page's headline.

    Returns: level; text: one sentence; error: what to read first, "" if there is none; details: the whole message if it is longer;
    failed: the step that failed and the count of its samples, None if there are none.
    """
    steps = [row["step"] for row in run.rows if row.get("unfinished")]
    failed = {"step": steps[0], "count": len(steps)} if steps else None
    end, progress = run.end, _progress(run)
    if end is None:
        text = f"{progress}: no end is recorded. It goes on, or its machine or container was ended"
        return {"level": "plain", "text": text, "error": "", "details": "", "failed": failed}
    where = f" in {end.phase.replace(': ', ', ')}" if end.phase else ""
    where += f" (rank {end.rank})" if end.rank else ""
    text = {
        "done": f"Done: {progress}",
        "evaluated": f"Evaluated after {progress}",
        "stopped": f"Stopped{where}: {progress}",
        "failed": f"Failed{where}: {progress}",
        "killed": f"Killed{where}: {progress}",
        "hung": f"Ended by the watchdog{where}: {progress}",
    }.get(end.outcome, f"{end.outcome}{where}: {progress}")
    if end.outcome == "evaluated" and not any(run.steps):
        text = "Evaluated, without training"
    if end.outcome in ("done", "evaluated"):
        level = "good"
    elif end.outcome == "stopped" and end.code > 128:  # by a signal; else training stopped itself
        level = "warn"
    else:
        level = "bad"
    whole = end.message.strip()
    lines = (end.error.strip() or whole).splitlines()
    error = "\n".join(lines[:ERROR_LINES])
    details = whole if len(whole.splitlines()) > len(error.splitlines()) else ""
    return {"level": level, "text": text, "error": error, "details": details, "failed": failed}


def _progress(run: Run) -> str:
    """Example: "7 of 50 steps in 1 min 3 s, the last at 2026-11-22 17:40 UTC"."""
    if not run.steps:
        return "no step was recorded"
    last, total = run.steps[-1], run.total_steps
    if total is not None and last < total:
        text = f"{last} of {total} steps"
    else:
        text = f"{last} step" if last == 1 else f"{last} steps"
    seconds = run.worked_s()
    if seconds is not None:
        text += f" in {_duration(seconds)}"
    times = [time for time in run.times if time is not None]
    if times:
        text += f", the last at {datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M} UTC"
    return text


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def lines(run: Run) -> list[Line]:
    """The run in figures, the most important first."""
    return [*_faults(run), *_accuracies(run), *_changes(run), *_groups(run), *_step(run)]


def _faults(run: Run) -> Iterator[Line]:
    """What went wrong: failed reward functions, numbers that are not finite, lost samples, errors in the log."""
    for key in run.series:
        total = sum(run.points(key)[1])
        if total and key.startswith("reward/") and key.endswith("/failures"):
            function = key.removeprefix("reward/").removesuffix("/failures")
            text = f"reward function {function} failed for {_figure(total)} completions"
            yield Line("bad", text, key)
        elif total and (key.endswith("/non_finite") or key.startswith("nonfinite/")):
            yield Line("bad", f"{_figure(total)} values of {key} are not finite", key)
    for key, name in (
        ("obs/sink_errors", "sinks disabled by an error"),
        ("obs/dropped_rows", "sample rows dropped"),
    ):
        if most := max(run.points(key)[1], default=0):
            yield Line("warn", f"{_figure(most)} {name}", key)
    if errors := sum(warning.count for warning in run.warnings if warning.level != "WARNING"):
        yield Line("bad", f"{errors} error{'' if errors == 1 else 's'} in the log")


def _accuracies(run: Run) -> Iterator[Line]:
    """Example: "held-out accuracy 61.7 → 99.6 % (95 % interval 97.8 to 99.9, 256 prompts)", from the first evaluation to the last."""
    for key, name in (
        ("evaluation/accuracy", "held-out accuracy"),
        ("evaluation/sampled/accuracy", "sampled accuracy"),
    ):
        steps, values = run.points(key)
        if not values:
            continue
        text = f"{name} {100 * values[0]:.1f}"
        text += f" → {100 * values[-1]:.1f} %" if len(values) > 1 else f" % at step {steps[0]}"
        lows, highs = (run.points(f"{key}_{end}")[1] for end in ("low", "high"))
        if lows and highs:
            prompts = _num_held_out_prompts(run)
            of_prompts = f", {prompts} prompts" if prompts else ""
            text += f" (95 % interval {100 * lows[-1]:.1f} to {100 * highs[-1]:.1f}{of_prompts})"
        best = values.index(max(values))
        if values[best] > values[-1]:
            text += f"; best {100 * values[best]:.1f} % at step {steps[best]}"
        yield Line("plain", text, key)


def _num_held_out_prompts(run: Run) -> int:
    """The prompts of the last greedy evaluation whose rows are stored; they may be fewer than the config asks for. 0 without rows."""
    prompts: dict[int, set[Any]] = {}
    for row in run.rows:
        if row.get("split") == HELD_OUT_SPLIT and not row.get("unfinished"):
            prompts.setdefault(row["step"], set()).add(row.get("prompt_idx"))
    return len(prompts[max(prompts)]) if prompts else 0


def _changes(run: Run) -> Iterator[Line]:
    """The mean of the first tenth of the values and of the last. Example: "entropy 0.21 → 0.02 nats per token"."""
    for key, (name, unit) in CHANGES.items():
        values = run.points(key)[1]
        if len(values) < 2:
            continue
        width = max(1, len(values) // 10)
        text = f"{name} {_figure(fmean(values[:width]))} → {_figure(fmean(values[-width:]))} {unit}"
        yield Line("plain", text.rstrip(), key)


def _groups(run: Run) -> Iterator[Line]:
    key = "groups/zero_variance_fraction"
    steps, values = run.points(key)
    if values:
        text = f"all rewards equal in {100 * fmean(values):.0f} % of groups, {100 * values[-1]:.0f} % in step {steps[-1]}"
        yield Line("plain", text, key)
    key = "completions/clipped_fraction"
    steps, values = run.points(key)
    if any(values):
        text = f"{100 * fmean(values):.0f} % of completions truncated, {100 * values[-1]:.0f} % in step {steps[-1]}"
        yield Line("plain", text, key)


def _step(run: Run) -> Iterator[Line]:
    """How near sampler and trainer are, and where the steps' time went."""
    key = "sampler/logprob_diff/max"
    steps, values = run.points(key)
    if values:
        worst = max(values)
        text = f"log-probs of trainer and sampler differ by at most {_figure(worst)} nats (step {steps[values.index(worst)]})"
        yield Line("plain", text, key)
    shares = time_shares(run)
    if shares:
        text = ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items())
        yield Line("plain", f"time of all steps: {text}", "time/step")


def time_shares(run: Run) -> dict[str, float]:
    """The parts of all steps' time, the largest first, without those below half a percent. A step weighs by its seconds."""
    seconds: dict[str, float] = {}
    for key, values in run.series.items():
        if key.startswith("share/"):
            step_seconds = zip(values, run.series.get("time/step", ()))
            total = sum(share * step_s for share, step_s in step_seconds if share and step_s)
            seconds[key.removeprefix("share/")] = total
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return {part: value / total for part, value in ordered if value >= 0.005 * total > 0}


def _figure(value: float) -> str:
    """A number in short form. Example: 3.57e-05 as "3.6e-05", 1.13750 as "1.14", 1923.4 as "1,923"."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
