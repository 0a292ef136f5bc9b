"""A run, or several, as one HTML file that opens anywhere: what the model did, samples first. See docs/report.md."""

from torchtitan_rl.report.load import Run, load_run
from torchtitan_rl.report.page import write_report

__all__ = ["Run", "load_run", "write_report"]
