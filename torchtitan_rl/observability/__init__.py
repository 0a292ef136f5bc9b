"""Metrics, sample tables and traces. Nothing in here can change training. See docs/observability.md."""

from torchtitan_rl.observability.collector import record_metric, record_metrics
from torchtitan_rl.observability.progress import elapsed, heartbeat, phase, progress, timed
from torchtitan_rl.observability.recorder import Recorder
from torchtitan_rl.observability.reduce import Reduce
from torchtitan_rl.observability.rows import episode_rows
from torchtitan_rl.observability.store import read_rows, read_samples

__all__ = [
    "Recorder",
    "Reduce",
    "elapsed",
    "episode_rows",
    "heartbeat",
    "phase",
    "progress",
    "read_rows",
    "read_samples",
    "record_metric",
    "record_metrics",
    "timed",
]
