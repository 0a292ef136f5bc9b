"""Verdicts: sentences about a run, each computed from its data. A verdict without data is omitted."""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

from torchtitan_rl.report.load import Run, answers_given, correlation, number

Level = Literal["good", "plain", "warn", "bad"]

UNACCOUNTED = 0.1
"""A larger share of step time outside of all phases is a warning."""
SILENT_GROUPS = 0.5
"""A larger share of groups without signal, late in the run, is a warning."""
COLLAPSE = 0.1
"""Entropy below this share of its first value is a warning."""
SPIKE = 10.0
"""A gradient norm above this multiple of its median is a warning."""


class Verdict(NamedTuple):
    """One line of the overview.

    Example: Verdict("good", "reward rose from 0.45 to 1.14", "reward/mean")
    """

    level: Level
    text: str
    key: str | None = None
    """The metric that the line links to."""


def verdicts(run: Run) -> list[Verdict]:
    """The lines of one run, the most important first."""
    return [line for judge in _JUDGES for line in judge(run)]


def _held_out_prompts(run: Run) -> int | None:
    """The number of held-out prompts in an evaluation; None if the config does not say."""
    found = run.config.get("evaluation")
    count = found.get("num_prompts") if isinstance(found, dict) else None
    return count if isinstance(count, int) and count > 0 else None


def _progress(run: Run) -> Iterator[Verdict]:
    if not run.steps:
        yield Verdict("bad", "no step was recorded")
        return
    last, total = run.steps[-1], run.total_steps
    times = [time for time in run.times if time is not None]
    span = f" in {_duration(times[-1] - times[0])}" if len(times) > 1 else ""
    when = f", the last at {datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M} UTC" if times else ""
    if run.finished or total is None:
        yield Verdict("plain", f"{last} steps{span}{when}")
    else:
        yield Verdict("warn", f"{last} of {total} steps{span}{when}: still running or stopped early")


def _reward(run: Run) -> Iterator[Verdict]:
    key = "reward/mean"
    _, values = run.points(key)
    if len(values) < 2:
        return
    first, last, width, noise = _ends(values)
    means = f" (means of the first and last {width} steps)" if width > 1 else ""
    best = f"; best {_figure(max(values))} at step {run.points(key)[0][values.index(max(values))]}"
    if abs(last - first) <= noise:
        yield Verdict("warn", f"reward did not change significantly: {_figure(first)} → {_figure(last)}{means}", key)
    elif last > first:
        yield Verdict(
            "good", f"reward rose from {_figure(first)} to {_figure(last)} in {run.steps[-1]} steps{means}", key
        )
    else:
        yield Verdict("bad", f"reward fell from {_figure(first)} to {_figure(last)}{means}{best}", key)


def _accuracy(run: Run) -> Iterator[Verdict]:
    for key, kind in (
        ("evaluation/accuracy", "held-out accuracy"),
        ("evaluation/sampled/accuracy", "sampled accuracy"),
    ):
        steps, values = run.points(key)
        if not values:
            continue
        low_high, level, half = "", "plain", 0.02
        lows, highs = (run.points(f"{key}_{end}")[1] for end in ("low", "high"))
        if lows and highs:
            n, half = _held_out_prompts(run), (highs[-1] - lows[-1]) / 2
            prompts = f", {n} prompts" if n else ""
            low_high = f" (95 % interval {100 * lows[-1]:.1f} to {100 * highs[-1]:.1f}{prompts})"
        if len(values) == 1:
            yield Verdict("plain", f"{kind} {100 * values[0]:.1f} % at step {steps[0]}{low_high}", key)
            continue
        if abs(values[-1] - values[0]) > half:
            level = "good" if values[-1] > values[0] else "bad"
        best = max(values)
        fell = f"; best {100 * best:.1f} % at step {steps[values.index(best)]}" if best - values[-1] > half else ""
        level = "warn" if fell and level == "good" else level
        yield Verdict(level, f"{kind} {100 * values[0]:.1f} → {100 * values[-1]:.1f} %{low_high}{fell}", key)


def _entropy(run: Run) -> Iterator[Verdict]:
    key = "policy/entropy"
    steps, values = run.points(key)
    if len(values) < 2 or values[0] <= 0:
        return
    first, last, width, noise = _ends(values)
    change = f"entropy {_figure(first)} → {_figure(last)} nats per token"
    if last < COLLAPSE * first:
        low = COLLAPSE * first
        place = next(i for i, value in enumerate(values) if value < low and fmean(values[i : i + width]) < low)
        yield Verdict("warn", f"entropy fell to less than a tenth by step {steps[place]}: {change}", key)
    elif last > 2 * first and last - first > noise:
        yield Verdict("warn", f"entropy grew {last / first:.1f}-fold: {change}", key)
    else:
        yield Verdict("plain", change, key)


def _groups(run: Run) -> Iterator[Verdict]:
    key = "groups/zero_variance_fraction"
    _, values = run.points(key)
    if values:
        _, last, width, _ = _ends(values)
        late = f"; {100 * last:.0f} % in the last {width} steps" if len(values) > width else ""
        level = "warn" if last > SILENT_GROUPS else "plain"
        yield Verdict(level, f"{100 * fmean(values):.0f} % of groups gave no signal (all rewards equal){late}", key)


def _sampler(run: Run) -> Iterator[Verdict]:
    key = "sampler/logprob_diff/max"
    steps, values = run.points(key)
    if not values:
        return
    worst, where = max(values), steps[values.index(max(values))]
    mean = run.points("sampler/logprob_diff/mean")[1]
    average = f", {_figure(fmean(mean))} on average" if mean else ""
    bound = _bound(run)
    text = f"log-probs of trainer and sampler differ by at most {_figure(worst)} nats (step {where}){average}"
    if bound is not None and worst > bound:
        yield Verdict("warn", f"{text}; above trainer.logprob_gate.max_diff = {_figure(bound)}", key)
    else:
        yield Verdict("good" if worst < 0.01 else "plain", text, key)


def _bound(run: Run) -> float | None:
    trainer = run.config.get("trainer")
    gate = trainer.get("logprob_gate") if isinstance(trainer, dict) else None
    return number(gate.get("max_diff")) if isinstance(gate, dict) else None


def _length(run: Run) -> Iterator[Verdict]:
    key = "completions/length/mean"
    _, values = run.points(key)
    if len(values) > 1:
        first, last, _, noise = _ends(values)
        doubled = abs(last - first) > noise and not 0.5 < last / max(first, 1e-9) < 2
        level = "warn" if doubled else "plain"
        yield Verdict(level, f"completions {_figure(first)} → {_figure(last)} tokens on average", key)
    key = "completions/clipped_fraction"
    _, values = run.points(key)
    if values and (last := _ends(values)[1]) > 0.05:
        yield Verdict("warn", f"{100 * last:.0f} % of late completions were truncated", key)


def _gradient(run: Run) -> Iterator[Verdict]:
    key = "optimizer/grad_norm"
    steps, values = run.points(key)
    if len(values) > 4 and (middle := median(values)) > 0 and max(values) > SPIKE * middle:
        worst = max(values)
        where = steps[values.index(worst)]
        times = worst / middle
        yield Verdict(
            "warn", f"gradient norm peaked at {_figure(worst)} in step {where}, {times:.0f} times its median", key
        )


def _time(run: Run) -> Iterator[Verdict]:
    total = sum(run.points("time/step")[1])
    if total <= 0:
        return
    phases = {key[5:]: sum(run.points(key)[1]) / total for key in run.series if _is_phase(key)}
    largest = sorted(phases, key=lambda name: -phases[name])[:3]
    shares = ", ".join(f"{name} {100 * phases[name]:.0f} %" for name in largest)
    if shares:
        yield Verdict("plain", f"step time: {shares}", "time/step")
    lost = sum(run.points("time/unaccounted")[1]) / total
    if run.series.get("time/unaccounted"):
        level = "warn" if lost > UNACCOUNTED else "plain"
        yield Verdict(level, f"{100 * lost:.1f} % of step time is unaccounted for", "time/unaccounted")


def _is_phase(key: str) -> bool:
    return key.startswith("time/") and key.count("/") == 1 and key not in ("time/step", "time/unaccounted")


def _numbers(run: Run) -> Iterator[Verdict]:
    counted = {
        key: sum(run.points(key)[1]) for key in run.series if "non_finite" in key or key.startswith("nonfinite/")
    }
    if bad := {key: count for key, count in counted.items() if count}:
        worst = max(bad, key=lambda key: bad[key])
        yield Verdict("bad", f"{_figure(sum(bad.values()))} values are not finite, most of them in {worst}", worst)
    for key in run.series:
        failures = sum(run.points(key)[1]) if key.startswith("reward/") and key.endswith("/failures") else 0
        if failures:
            yield Verdict("bad", f"reward function {key[7:-9]} failed for {_figure(failures)} completions", key)
    for key, text in (("obs/sink_errors", "sinks disabled by an error"), ("obs/dropped_rows", "sample rows dropped")):
        if most := max(run.points(key)[1], default=0):
            yield Verdict("warn", f"{_figure(most)} {text}", key)


def _samples(run: Run) -> Iterator[Verdict]:
    trained = [r for r in run.rows if r.get("split") == "train"]
    prompts = len({str(r.get("prompt")) for r in trained})
    if prompts >= 20:
        answer, count = answers_given(trained).most_common(1)[0] if answers_given(trained) else ("", 0)
        expected = {str(r.get("prompt")) for r in trained if str(r.get("expected_answer")) == answer}
        if count - len(expected) > 0.1 * prompts:
            given = f"the answer {answer[:40]!r} was given to {count} of {prompts} prompts"
            yield Verdict("warn", f"{given}, but is expected by {len(expected)}: read those samples")
    pairs = [(number(r.get("response_tokens")), number(r.get("reward"))) for r in trained]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    r = correlation([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) >= 30 else None
    if r is not None and abs(r) > 0.5:
        yield Verdict("warn", f"reward correlates with length (r = {r:.2f} over {len(pairs)} samples)")


def _log(run: Run) -> Iterator[Verdict]:
    errors = sum(w.count for w in run.warnings if w.level != "WARNING")
    if errors:
        yield Verdict("bad", f"{errors} error{'s' * (errors > 1)} in the log")


_JUDGES: tuple[Callable[[Run], Iterator[Verdict]], ...] = (
    _progress, _reward, _accuracy, _entropy, _groups, _sampler, _length, _gradient, _time, _numbers, _samples, _log,
)  # fmt: skip


def _ends(values: list[float]) -> tuple[float, float, int, float]:
    """Compares the first and the last tenth of the values.

    Returns: (mean of the first, mean of the last, number of values in each, difference explained by noise alone).
    """
    width = max(1, len(values) // 10)
    first, last = values[:width], values[-width:]
    jumps = [b - a for a, b in zip(values, values[1:])]
    spread = stdev(jumps) / math.sqrt(2) if len(jumps) > 1 else 0.0
    return fmean(first), fmean(last), width, 2 * spread * math.sqrt(2 / width)


def _figure(value: float) -> str:
    """A number in short form. Example: 3.57e-05 as "3.6e-05", 1.13750 as "1.14"."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
