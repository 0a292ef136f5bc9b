"""What a step leaves behind as numbers. docs/metrics.md lists every key."""
