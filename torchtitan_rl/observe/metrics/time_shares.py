"""Where a step's time went: its parts as shares of the step and of the save before it, which sum to 1."""

from collections.abc import Callable

from torchtitan_rl.types import Metric

PARTS = {
    "generate": ("generate",),
    "grade": ("grade",),
    "train": ("train", "reference", "teacher", "teacher_average", "hints"),
    "sync": ("sync",),
    "evaluate": ("evaluate",),
    "checkpoint": ("checkpoint/save",),
    "wait": ("gather",),
}
"""The timed phases of each part. Frozen models' forwards belong to train; gather waits for the slowest replica."""


def time_shares(elapsed: Callable[[str], float]) -> dict[str, Metric]:
    """`share/<part>` of this rank, merged as the mean over ranks; `share/other` is outside of all parts.

    Args:
        elapsed: seconds in a phase, such as "step", since the last step's flush.
    """
    total = elapsed("step") + elapsed("checkpoint/save")
    if total <= 0:
        return {}
    seconds = {part: sum(map(elapsed, phases)) for part, phases in PARTS.items()}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return {f"share/{part}": Metric(s / total) for part, s in seconds.items()}
