"""Writes the report of one run, or of several, as one HTML file that needs no network.

python -m torchtitan_rl.report outputs/debug                             outputs/debug/report.html
python -m torchtitan_rl.report outputs/debug outputs/other               the two overlaid and compared, report.html
python -m torchtitan_rl.report outputs/debug --watch                     again and again while the run goes on
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.report.page import SIZE_MB, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes what `arguments` ask for. Returns the exit code: 0; 2: a folder that is no run, or no place to write to."""
    options = _parser().parse_args(arguments)
    output = options.output or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    try:
        if options.watch:
            return _watch(options, output)
        write_report(options.runs, output, size_mb=options.size)
    except OSError as error:
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
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run; several are compared")
    parser.add_argument("--output", type=Path, metavar="FILE", help="RUN/report.html, or report.html of several runs")
    parser.add_argument(
        "--size", type=float, default=SIZE_MB, metavar="MB", help="of the file at most; default %(default)s"
    )
    parser.add_argument("--watch", action="store_true", help="write it again as the runs go on, until they are done")
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="S", help="seconds between looks; default %(default)s"
    )
    return parser


def _watch(options: argparse.Namespace, output: Path) -> int:
    """Writes the report whenever a run's files have changed; ends when all runs have made their last step, or Ctrl-C."""
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
    write_report(options.runs, output, size_mb=options.size)  # a page that reads itself again no more
    return 0


def _changed(folder: Path) -> list[tuple[int, int]]:
    """Size and time of the files that a run appends to."""
    files = [folder / name for name in ("metrics.jsonl", "metrics.rank0.jsonl", "samples.jsonl")]
    return [(s.st_size, s.st_mtime_ns) for s in (file.stat() for file in files if file.is_file())]


if __name__ == "__main__":
    sys.exit(main())
