"""Writes the report of a run, or of several that are compared, as one HTML file that needs no network.

torchtitan-rl report outputs/debug                       writes outputs/debug/report.html
torchtitan-rl report outputs/debug outputs/other         writes outputs/comparison.html: curves, settings and answers side by side
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.errors import expect
from torchtitan_rl.observe.report.page import SIZE_MB, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 2 if the folder is not a run, or the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="torchtitan-rl report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run folder")
    default = "default: RUN/report.html; comparison.html beside the first of several runs"
    parser.add_argument("--output", type=Path, metavar="FILE", help=default)
    size = f"maximum size of the page; further samples are left out; default: {SIZE_MB:g}"
    parser.add_argument("--size", type=float, default=SIZE_MB, metavar="MB", help=size)
    options = parser.parse_args(arguments)
    folders = [str(run.resolve()) for run in options.runs]
    is_once = len({*folders}) == len(folders)
    expect(is_once, "RUN", folders, "each run once", "Leave the repeated one out.")
    run, *others = options.runs
    output = options.output or (run.parent / "comparison.html" if others else run / "report.html")
    try:
        write_report(run, output, others=others, size_mb=options.size)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
