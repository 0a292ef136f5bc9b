"""The report: one HTML file with the metrics and samples of a run. See docs/report.md."""

from torchtitan_rl.observe.report.load import Run, load_run
from torchtitan_rl.observe.report.page import write_report
