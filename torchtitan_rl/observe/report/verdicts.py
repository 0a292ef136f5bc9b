"""Verdicts: sentences about a run, each computed from its data. A verdict without data is omitted."""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torchtitan_rl.observe.report.load import HELD_OUT_SPLIT, Run, number
from torchtitan_rl.observe.report.trend import ALPHA, differ_paired, trend

Level = Literal["good", "plain", "warn", "bad"]

UNACCOUNTED = 0.1
"""A larger share of step time outside of all phases is a warning."""
SILENT_GROUPS = 0.5
"""A larger share of groups without signal, late in the run, is a warning."""
COLLAPSE = 0.1
"""Entropy below this share of its first value is a warning."""


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
    """The number of held-out prompts in an evaluation: those of its rows, which may be fewer than the config asks for. Without all
    rows the config's; None if it does not say."""
    evaluations: dict[Any, set[Any]] = {}
    for row in run.rows:
        if row.get("split") == HELD_OUT_SPLIT and not row.get("unfinished"):
            evaluations.setdefault(row.get("step"), set()).add(row.get("prompt_idx"))
    if evaluations:
        return max(map(len, evaluations.values()))
    count = run.setting("evaluation.num_prompts")
    return count if isinstance(count, int) and count > 0 else None


def _reward(run: Run) -> Iterator[Verdict]:
    key = "reward/mean"
    steps, values = run.points(key)
    if not values:
        return
    first, last, means = _ends(values)
    change = f"{_figure(first)} → {_figure(last)}"
    found = trend(values)
    if not run.learns_from_rewards:
        yield Verdict("plain", f"reward {change}{means}; the loss does not read it", key)
    elif found == "too few":
        count = f"{len(values)} step{'s' * (len(values) > 1)}"
        shown = change if len(values) > 1 else _figure(first)
        yield Verdict(
            "plain", f"too few steps to say whether the reward changed: {shown} ({count})", key
        )
    elif found == "unclear":
        yield Verdict(
            "warn", f"no clear change of the reward: {change}{means}; noise alone may do this", key
        )
    elif found == "rose":
        yield Verdict(
            "good",
            f"reward rose from {_figure(first)} to {_figure(last)} in {steps[-1]} steps{means}",
            key,
        )
    else:
        best = f"; best {_figure(max(values))} at step {steps[values.index(max(values))]}"
        yield Verdict(
            "bad", f"reward fell from {_figure(first)} to {_figure(last)}{means}{best}", key
        )


def _accuracy(run: Run) -> Iterator[Verdict]:
    for key, kind in (
        ("evaluation/accuracy", "held-out accuracy"),
        ("evaluation/sampled/accuracy", "sampled accuracy"),
    ):
        steps, values = run.points(key)
        if not values:
            continue
        lows, highs = (run.points(f"{key}_{end}")[1] for end in ("low", "high"))
        said, n = "", _held_out_prompts(run)
        if lows and highs:
            said = f" (95 % interval {100 * lows[-1]:.1f} to {100 * highs[-1]:.1f}{f', {n} prompts' if n else ''})"
        if len(values) == 1:
            yield Verdict("plain", f"{kind} {100 * values[0]:.1f} % at step {steps[0]}{said}", key)
            continue
        best = values.index(max(values))
        flips = [_flips(run, key, place) for place in (0, best)]
        p_change, p_fell = (
            None if flipped is None else differ_paired(*flipped) for flipped in flips
        )
        clear = p_change is not None and p_change < ALPHA
        level = ("good" if values[-1] > values[0] else "bad") if clear else "plain"
        changed = (
            f"; {flips[0][0]} prompts became right, {flips[0][1]} wrong"
            if flips[0] and any(flips[0])
            else ""
        )
        unclear = (
            ""
            if clear or p_change is None or values[0] == values[-1]
            else "; the difference may be chance"
        )
        # Of many evaluations the best one is high by chance too (Bonferroni).
        fell = p_fell is not None and p_fell < ALPHA / (len(values) - 1)
        before = f"; best {100 * values[best]:.1f} % at step {steps[best]}" if fell and best else ""
        level = "warn" if before and level != "bad" else level
        change = f"{100 * values[0]:.1f} → {100 * values[-1]:.1f} %"
        if values[0] == values[-1]:
            change = f"{100 * values[-1]:.1f} %, as at the start"
        when = f" at step {steps[-1]}" if steps[-1] < run.steps[-1] else ""
        yield Verdict(level, f"{kind} {change}{when}{said}{changed}{unclear}{before}", key)


def _flips(run: Run, key: str, place: int) -> tuple[int, int] | None:
    """How many prompts the last evaluation has right and the one at `place` wrong, and the reverse.

    None if the rows of both evaluations are not all stored: only those of the greedy evaluation are, and not in large files.
    """
    if key != "evaluation/accuracy":
        return None
    steps, values = run.points(key)
    before, after = (_judged(run, steps[i]) for i in (place, -1))
    for judged, value in ((before, values[place]), (after, values[-1])):
        if not judged or abs(fmean(judged.values()) - value) > 1e-6:
            return None
    if before.keys() != after.keys() or (n := _held_out_prompts(run)) and n != len(after):
        return None
    return sum(after[p] > before[p] for p in after), sum(after[p] < before[p] for p in after)


def _judged(run: Run, step: int) -> dict[tuple[Any, str], bool]:
    """Whether each held-out prompt was answered right in the greedy evaluation of a step."""
    rows = [
        row for row in run.rows if (row.get("split"), row.get("step")) == (HELD_OUT_SPLIT, step)
    ]
    rows = [row for row in rows if not row.get("unfinished")]
    return {
        (r.get("prompt_idx"), str(r.get("prompt"))): r["correct"]
        for r in rows
        if isinstance(r.get("correct"), bool)
    }


def _taught(run: Run) -> Iterator[Verdict]:
    """What demonstrations and a teacher lower instead of raising a reward."""
    for key, kind in (
        ("evaluation/loss", "held-out loss"),
        ("teacher/divergence", "divergence from the teacher"),
        ("teacher/kl_k3", "estimated KL from the teacher"),
    ):
        _, values = run.points(key)
        if len(values) > 1:
            first, last, means = _ends(values)
            level = {"fell": "good", "rose": "bad"}.get(trend(values), "plain")
            yield Verdict(
                level, f"{kind} {_figure(first)} → {_figure(last)} nats per token{means}", key
            )


def _entropy(run: Run) -> Iterator[Verdict]:
    key = "policy/entropy"
    steps, values = run.points(key)
    if len(values) < 2 or values[0] <= 0:
        return
    first, last, _ = _ends(values)
    width = _width(values)
    change = f"entropy {_figure(first)} → {_figure(last)} nats per token"
    if last < COLLAPSE * first:
        low = COLLAPSE * first
        place = next(
            i
            for i, value in enumerate(values)
            if value < low and fmean(values[i : i + width]) < low
        )
        yield Verdict(
            "warn", f"entropy fell to less than a tenth by step {steps[place]}: {change}", key
        )
    elif last > 2 * first and trend(values) == "rose":
        yield Verdict("warn", f"entropy grew {last / first:.1f}-fold: {change}", key)
    else:
        yield Verdict("plain", change, key)


def _groups(run: Run) -> Iterator[Verdict]:
    key = "groups/zero_variance_fraction"
    _, values = run.points(key)
    if values and run.learns_from_rewards:
        width, last = _width(values), _ends(values)[1]
        late = (
            f"; {100 * last:.0f} % in the last {f'{width} steps' if width > 1 else 'step'}"
            if len(values) > width
            else ""
        )
        level = "warn" if last > SILENT_GROUPS else "plain"
        shares = {word: run.points(f"groups/all_{word}_fraction")[1] for word in ("right", "wrong")}
        most = [
            word
            for word, share in shares.items()
            if last and share and _ends(share)[1] > 0.5 * last
        ]
        why = f", most of them all {most[0]}" if level == "warn" and most else ""
        yield Verdict(
            level,
            f"{100 * fmean(values):.0f} % of groups gave no signal (all rewards equal){late}{why}",
            key,
        )


def _sampler(run: Run) -> Iterator[Verdict]:
    key = "sampler/logprob_diff/max"
    steps, values = run.points(key)
    if not values:
        return
    worst, where = max(values), steps[values.index(max(values))]
    mean = run.points("sampler/logprob_diff/mean")[1]
    average = f", {_figure(fmean(mean))} on average" if mean else ""
    bound = number(run.setting("trainer.logprob_gate.max_diff"))
    text = f"log-probs of trainer and sampler differ by at most {_figure(worst)} nats (step {where}){average}"
    if bound is not None and worst > bound:
        yield Verdict(
            "warn", f"{text}; above trainer.logprob_gate.max_diff = {_figure(bound)}", key
        )
    else:
        yield Verdict("good" if worst < 0.01 else "plain", text, key)


def _length(run: Run) -> Iterator[Verdict]:
    key = "completions/length/mean"
    _, values = run.points(key)
    if len(values) > 1:
        first, last, _ = _ends(values)
        doubled = trend(values) in ("rose", "fell") and not 0.5 < last / max(first, 1e-9) < 2
        level = "warn" if doubled else "plain"
        yield Verdict(
            level, f"completions {_figure(first)} → {_figure(last)} tokens on average", key
        )
    key = "completions/clipped_fraction"
    _, values = run.points(key)
    if values and (last := _ends(values)[1]) > 0.05:
        yield Verdict("warn", f"{100 * last:.0f} % of late completions were truncated", key)


def _time(run: Run) -> Iterator[Verdict]:
    seconds = time_by_phase(run)
    if not seconds:
        return
    total = sum(seconds.values())
    largest = sorted(
        (name for name in seconds if name != "unaccounted"), key=lambda name: -seconds[name]
    )[:3]
    shares = ", ".join(f"{name} {100 * seconds[name] / total:.0f} %" for name in largest)
    if shares:
        yield Verdict("plain", f"step time: {shares}", "time/step")
    if "unaccounted" in seconds:
        lost = seconds["unaccounted"] / total
        level = "warn" if lost > UNACCOUNTED else "plain"
        yield Verdict(
            level, f"{100 * lost:.1f} % of step time is unaccounted for", "time/unaccounted"
        )


def time_by_phase(run: Run) -> dict[str, float]:
    """Seconds of all steps by phase, with "unaccounted" for the rest. They sum to the steps' time.

    A step 0 has an evaluation but no time/step: it is left out. With several ranks each phase is the slowest rank's, so that a
    step's phases may sum to more than the step: then they are scaled down to it.
    """
    keys = [key for key in run.series if _is_phase(key)]
    found = dict.fromkeys((key[5:] for key in keys), 0.0)
    rest = 0.0
    for place, step_s in enumerate(run.series.get("time/step", ())):
        if step_s:
            phases = {key[5:]: run.series[key][place] or 0.0 for key in keys}
            scale = min(1.0, step_s / (sum(phases.values()) or 1.0))
            for name, seconds in phases.items():
                found[name] += scale * seconds
            rest += step_s - scale * sum(phases.values())
    if not rest and not sum(found.values()):
        return {}
    return {**found, "unaccounted": rest}


def _is_phase(key: str) -> bool:
    return (
        key.startswith("time/")
        and key.count("/") == 1
        and key not in ("time/step", "time/unaccounted")
    )


def _numbers(run: Run) -> Iterator[Verdict]:
    counted = {
        key: sum(run.points(key)[1])
        for key in run.series
        if "non_finite" in key or key.startswith("nonfinite/")
    }
    if bad := {key: count for key, count in counted.items() if count}:
        worst = max(bad, key=lambda key: bad[key])
        yield Verdict(
            "bad",
            f"{_figure(sum(bad.values()))} values are not finite, most of them in {worst}",
            worst,
        )
    for key in run.series:
        failures = (
            sum(run.points(key)[1])
            if key.startswith("reward/") and key.endswith("/failures")
            else 0
        )
        if failures:
            yield Verdict(
                "bad",
                f"reward function {key[7:-9]} failed for {_figure(failures)} completions",
                key,
            )
    for key, text in (
        ("obs/sink_errors", "sinks disabled by an error"),
        ("obs/dropped_rows", "sample rows dropped"),
    ):
        if most := max(run.points(key)[1], default=0):
            yield Verdict("warn", f"{_figure(most)} {text}", key)


def _log(run: Run) -> Iterator[Verdict]:
    sign = "no learning signal"  # of observe/metrics/idle.py, which has seen all samples
    if silent := [w for w in run.warnings if sign in w.text]:
        latest = max(silent, key=lambda w: w.first)
        yield Verdict(
            "warn", sign + latest.text.partition(sign)[2], "groups/zero_variance_fraction"
        )
    errors = sum(w.count for w in run.warnings if w.level != "WARNING")
    if errors:
        yield Verdict("bad", f"{errors} error{'s' * (errors > 1)} in the log")


_JUDGES: tuple[Callable[[Run], Iterator[Verdict]], ...] = (
    _reward, _accuracy, _taught, _entropy, _groups, _sampler, _length, _time, _numbers, _log,
)  # fmt: skip


def _width(values: list[float]) -> int:
    """The number of values in the first and in the last tenth."""
    return max(1, len(values) // 10)


def _ends(values: list[float]) -> tuple[float, float, str]:
    """(mean of the first tenth of the values, mean of the last, words that say so)."""
    width = _width(values)
    means = f" (means of the first and last {width} steps)" if width > 1 else ""
    return fmean(values[:width]), fmean(values[-width:]), means


def _figure(value: float) -> str:
    """A number in short form. Example: 3.57e-05 as "3.6e-05", 1.13750 as "1.14", 1923.4 as "1,923"."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
