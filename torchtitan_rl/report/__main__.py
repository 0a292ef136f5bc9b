"""Writes the report of a run as one HTML file that needs no network.

python -m torchtitan_rl.report outputs/debug                             writes outputs/debug/report.html
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.report.page import SIZE_MB, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 2 if a folder is not a run, the file cannot be written or --size is too small."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if len(options.runs) > 1:
        parser.error(f"{len(options.runs)} run folders: expected one. To compare runs: tensorboard --logdir outputs")
    run = options.runs[0]
    output = options.output or run / "report.html"
    try:
        if output.is_dir():
            raise ValueError(f"--output {output} is a folder: expected a file, such as {output / 'report.html'}")
        write_report(run, output, size_mb=options.size)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--size",
        type=_above_zero,
        metavar="MB",
        help=f"maximum size of the page; further samples are left out; default: {SIZE_MB:g}",
    )
    return parser


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, without a unit")
    return number


if __name__ == "__main__":
    sys.exit(main())
