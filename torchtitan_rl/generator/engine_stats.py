"""Metrics of the engine's work: cache hits, preemptions, the tail."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl.types import Metric

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class EngineStats:
    """Replaces vLLM's `logger_manager`, whose Prometheus histograms are not needed here.

    The engine must have been built with disable_log_stats=False, and calls `record` after each of its steps.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded so far."""
        self._queries = self._hits = self._preemptions = 0
        self._steps: list[tuple[float, int]] = []  # (seconds at its end, sequences still running)

    def record(
        self,
        scheduler_stats: "SchedulerStats",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: Any = None,
    ) -> None:
        self._queries += scheduler_stats.prefix_cache_stats.queries
        self._hits += scheduler_stats.prefix_cache_stats.hits
        self._preemptions += iteration_stats.num_preempted_reqs if iteration_stats else 0
        self._steps.append((time.perf_counter(), scheduler_stats.num_running_reqs))

    def log(self) -> None:
        """Called by the engine every few seconds. Nothing is printed."""

    def record_sleep_state(self, *state: int) -> None:
        """Ignored: nothing here reads it."""

    def metrics(self) -> dict[str, Metric]:
        """`generator/...` of this replica since it began."""
        metrics = {
            "generator/preemptions": Metric(self._preemptions, "sum"),
            "generator/tail_s": Metric(tail_seconds(self._steps), "max"),
        }
        if self._queries:
            metrics["generator/prefix_cache_hit_rate"] = Metric(
                self._hits / self._queries, weight=self._queries
            )
        return metrics


def tail_seconds(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds in which fewer than half of the largest number of sequences ran.

    Args:
        steps: (when a step of the engine ended, sequences that were still running then), in order.

    Example: tail_seconds([(0.0, 8), (1.0, 8), (2.0, 3), (4.5, 0)]) == 2.5
    """
    most = max((running for _, running in steps), default=0)
    return sum(
        ended - began
        for (began, running), (ended, _) in zip(steps, steps[1:], strict=False)
        if 2 * running < most
    )
