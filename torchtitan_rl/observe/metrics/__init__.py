"""The metrics of a step. docs/metrics.md lists every key."""
