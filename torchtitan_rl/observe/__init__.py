"""Metrics, sample tables and traces. Nothing in this package can change training. See docs/observability.md."""

from torchtitan_rl.events import heartbeat, phase, progress, record_metric, record_metrics, timed
from torchtitan_rl.observe.recorder import Recorder
from torchtitan_rl.observe.reduce import Reduce
from torchtitan_rl.observe.sample_rows import episode_rows
from torchtitan_rl.observe.store import read_rows, read_samples
