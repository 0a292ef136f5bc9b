"""Writes the report of one or several runs as one HTML file that needs no network.

python -m torchtitan_rl.report outputs/debug                             writes outputs/debug/report.html
python -m torchtitan_rl.report outputs/debug outputs/other               writes report.html, comparing the two runs
python -m torchtitan_rl.report outputs/debug --watch                     updates it until the run has ended
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.report.load import FILES
from torchtitan_rl.report.page import SIZE_MB, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0; 2 if a folder is not a run, the file cannot be written or --size is too small."""
    options = _parser().parse_args(arguments)
    output = options.output or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    try:
        if output.is_dir():
            raise ValueError(f"--output {output} is a folder: expected a file, such as {output / 'report.html'}")
        if options.watch:
            return _watch(options, output)
        write_report(options.runs, output, size_mb=options.size)
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
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; several runs are compared")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html; several: report.html")
    parser.add_argument(
        "--size",
        type=_above_zero,
        metavar="MB",
        help=f"maximum size of the page; further samples are in a second file; default: {SIZE_MB:g}",
    )
    parser.add_argument("--watch", action="store_true", help="update the file until the runs have ended")
    parser.add_argument(
        "--every",
        type=_above_zero,
        default=10.0,
        metavar="S",
        help="seconds between checks of --watch; default %(default)s",
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


def _watch(options: argparse.Namespace, output: Path) -> int:
    """Writes the report whenever a run's files have changed. Ends after the last step of all runs, or on Ctrl-C."""
    seen = None
    try:
        while True:
            now = [_changed(folder) for folder in options.runs]
            if now != seen:
                seen = now
                runs = write_report(options.runs, output, size_mb=options.size, refresh_s=options.every)
                steps = ", ".join(f"{run.name} step {run.steps[-1] if run.steps else '-'}" for run in runs)
                print(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {steps}", flush=True)
                if all(run.finished for run in runs):
                    break
            time.sleep(options.every)
    except KeyboardInterrupt:
        pass
    write_report(options.runs, output, size_mb=options.size)  # the final page does not reload itself
    return 0


def _changed(folder: Path) -> list[tuple[int, int]]:
    """Sizes and modification times of the files that a run writes."""
    files = [folder / name for name in FILES]
    return [(s.st_size, s.st_mtime_ns) for s in (file.stat() for file in files if file.is_file())]


if __name__ == "__main__":
    sys.exit(main())
