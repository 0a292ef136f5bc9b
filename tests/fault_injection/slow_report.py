"""debug whose report takes long to write, as that of a large run on a slow disk."""

import os
import time

from configs.debug import debug
from torchtitan_rl import report

write_report = report.write_report


def write_slowly(*args, **more):
    """Sleeps for SLOW_S seconds first."""
    time.sleep(float(os.environ["SLOW_S"]))
    return write_report(*args, **more)


report.write_report = write_slowly


def slow_report():
    """The config."""
    return debug()
