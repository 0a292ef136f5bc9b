"""Metrics, sample tables and traces. Nothing in here can change training. See docs/observability.md."""

from torchtitan_rl.observability.collector import record_metric
from torchtitan_rl.observability.cost_set import optimizer_metrics, perf_metrics, time_metrics
from torchtitan_rl.observability.metric_set import (
    completion_metrics,
    diversity_metrics,
    evaluation_metrics,
    record_metrics,
)
from torchtitan_rl.observability.progress import heartbeat, phase, progress, timed
from torchtitan_rl.observability.recorder import Recorder
from torchtitan_rl.observability.reduce import Reduce
from torchtitan_rl.observability.rows import episode_row, episode_rows
from torchtitan_rl.observability.store import read_rows, read_samples

__all__ = [
    "Recorder",
    "Reduce",
    "completion_metrics",
    "diversity_metrics",
    "episode_row",
    "episode_rows",
    "evaluation_metrics",
    "heartbeat",
    "optimizer_metrics",
    "perf_metrics",
    "phase",
    "progress",
    "read_rows",
    "read_samples",
    "record_metric",
    "record_metrics",
    "time_metrics",
    "timed",
]
