"""The health page of one run: its warnings, and counts that should be 0."""

from collections.abc import Iterator
from typing import Any

from torchtitan_rl.report.load import Run


def health(run: Run) -> dict[str, Any]:
    """The page's tables, as plain values."""
    return {
        "notes": run.notes,
        "warnings": [{"level": w.level, "count": w.count, "first": w.first, "text": w.text} for w in run.warnings],
        "counts": list(_counts(run)),
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
