"""The health page of one run: warnings, counts, suspicious answers, reward correlations, missing metrics."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from torchtitan_rl.report.load import Run, answers_given, correlation, number, unbiased_rows

EXPECTED = (
    "reward/mean", "reward/std", "policy/entropy", "loss/total", "optimizer/grad_norm", "optimizer/learning_rate",
    "sampler/logprob_diff/max", "groups/zero_variance_fraction", "completions/length/mean", "time/step",
    "perf/step_tokens_per_s", "obs/overhead_ms",
)  # fmt: skip
"""Metrics that every run should have."""
OF_SAMPLES = ("reward/", "groups/", "sampler/")
"""Prefixes of those that a run has only if it samples what it learns from: one that learns from demonstrations need not."""
MAX_DUPLICATES = 8
"""Number of repeated answers to list, those most in excess of the expected number first."""
MAX_POINTS = 1500
"""Largest number of points in the scatter plot."""


def health(run: Run) -> dict[str, Any]:
    """The page's tables and points, as plain values."""
    trained = unbiased_rows(run)
    recorded = [row for row in run.rows if row.get("split", "train") == "train" and not row.get("unfinished")]
    return {
        "notes": run.notes,
        "warnings": [{"level": w.level, "count": w.count, "first": w.first, "text": w.text} for w in run.warnings],
        "counts": list(_counts(run)),
        "metrics": [*_missing(run), *_stale(run)],
        "duplicates": _duplicates(trained),
        "scatter": _scatter(trained),
        "parts": _parts(run, trained),
        "drawn": len(trained) < len(recorded),
    }


def _counts(run: Run) -> Iterator[dict[str, Any]]:
    """Counts that should be 0, with their total and the first step where they are not."""
    for key in sorted(run.series):
        counted = "non_finite" in key or key.startswith("nonfinite/") or key.endswith("/failures")
        steps, values = run.points(key)
        if key.startswith("obs/") and key != "obs/overhead_ms":
            yield {"key": key, "total": max(values), "first": next((s for s, v in zip(steps, values) if v), None)}
        elif counted:
            yield {"key": key, "total": sum(values), "first": next((s for s, v in zip(steps, values) if v), None)}


def _missing(run: Run) -> Iterator[dict[str, str]]:
    for key in EXPECTED if any(run.steps) else ():  # step 0 is an evaluation
        if key not in run.series and not (run.demonstrated and key.startswith(OF_SAMPLES)):
            yield {"key": key, "state": "missing", "why": "every run should have it"}


def _stale(run: Run) -> Iterator[dict[str, str]]:
    """Metrics that stopped: the time since the last value is more than three times the longest gap before."""
    for key in run.series:
        steps, _ = run.points(key)
        gaps = [b - a for a, b in zip(steps, steps[1:])]
        silence = run.steps[-1] - steps[-1]
        if gaps and silence > 3 * max(gaps) and len(steps) > 2:
            yield {"key": key, "state": "stopped", "why": f"last recorded at step {steps[-1]} of {run.steps[-1]}"}


def _duplicates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers given to several prompts, with the number of prompts that expect them."""
    expected: dict[str, set[str]] = {}
    for row in rows:
        expected.setdefault(str(row.get("expected_answer")), set()).add(str(row.get("prompt")))
    common = [(answer, count) for answer, count in answers_given(rows).items() if count > 1]
    found = [{"answer": a[:200], "prompts": count, "expected": len(expected.get(a, ()))} for a, count in common]
    found.sort(key=lambda one: (one["expected"] - one["prompts"], one["answer"]))
    return {"prompts": len({str(row.get("prompt")) for row in rows}), "answers": found[:MAX_DUPLICATES]}


def _scatter(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Length and reward of at most `MAX_POINTS` training samples, spread evenly over the run."""
    points = [(number(r.get("response_tokens")), number(r.get("reward")), r.get("correct")) for r in rows]
    points = [p for p in points if p[0] is not None and p[1] is not None]
    shown = points[:: max(1, -(-len(points) // MAX_POINTS))]
    return {
        "r": correlation([p[0] for p in points], [p[1] for p in points]),
        "n": len(points),
        "points": sorted(shown, key=lambda p: p[:2]),
    }


def _parts(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each reward function's mean over all samples of the run, and its correlation with the total reward over `rows`."""
    parts = sorted({column for row in rows for column in row if column.startswith("reward/")})
    found = []
    for part in parts:
        pairs = [(number(row.get(part)), number(row.get("reward"))) for row in rows]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        values = [a for a, _ in pairs]
        if values:
            means = run.points(f"{part}/mean")[1] or values
            r = correlation(values, [b for _, b in pairs])
            found.append({"key": part, "n": len(values), "mean": fmean(means), "r": r})
    return found
