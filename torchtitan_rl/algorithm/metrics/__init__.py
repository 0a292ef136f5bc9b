"""The metrics this room emits; docs/metrics_algorithm.md lists each key."""
