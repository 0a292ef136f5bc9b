"""Writes the report of a run as one HTML file that needs no network.

python -m torchtitan_rl.observe.report outputs/debug                             writes outputs/debug/report.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.observe.report.page import SIZE_MB, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 2 if the folder is not a run, or the file cannot be written."""
    parser = _parser()
    options = parser.parse_args(arguments)
    words = [word.partition("=")[0] for word in (sys.argv[1:] if arguments is None else arguments)]
    for option in ("--output", "--size"):
        if words.count(option) > 1:
            print(
                f"{option} is given {words.count(option)} times: the last one counts",
                file=sys.stderr,
            )
    if len(options.runs) > 1:
        parser.error(
            f"{len(options.runs)} run folders: expected one. To compare runs: tensorboard --logdir outputs"
        )
    run = options.runs[0]
    output = options.output or run / "report.html"
    try:
        write_report(run, output, size_mb=options.size)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.observe.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--size",
        type=float,
        default=SIZE_MB,
        metavar="MB",
        help=f"maximum size of the page; further samples are left out; default: {SIZE_MB:g}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
