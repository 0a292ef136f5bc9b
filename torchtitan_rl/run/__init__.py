"""Why no work is lost: the launcher, the watchdog, worker processes, checkpoints and signals. See docs/recovery.md."""
