"""Plot a run's reward and held-out accuracy over its steps, from its metrics.jsonl.

.venv/bin/python scripts/plot_run.py outputs/debug-20261120-130000 [MORE_RUNS ...] --output curve.png
.venv/bin/python scripts/plot_run.py outputs/seed_* --over-seeds --output curve.png     one curve for runs that differ only in their seed
"""

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.special import stdtrit

DRAWN = ("reward/mean", "evaluation/accuracy")
OF_ONE_RUN = ("seed", "dump_folder", "command", "folder_of_command")
"""Settings in which runs of the same config differ."""


def series(run: Path, key: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values) of one metric, for the steps that have it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def unique_names(folders: Iterable[Path]) -> list[str]:
    """A short unique name for each folder: the last part of its path, with as many parents as needed."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max((len(p) for p in parts), default=0) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(p[-1:])} ({place})" for place, p in enumerate(parts, 1)]


def is_plot(path: Path) -> bool:
    """Returns whether matplotlib has written a file: it says so in every image."""
    return path.is_file() and b"matplotlib" in path.read_bytes().lower()


def mean_over_runs(runs: list[Path], key: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns (steps, means, half widths of the 95 % intervals of the means), at the steps that all runs have.

    The interval is Student's t over runs: seeds are independent, the steps of one run are not.
    """
    found = [dict(zip(*series(run, key))) for run in runs]
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[one[step] for step in steps] for one in found]).reshape(len(runs), len(steps))  # [runs, steps]
    error = values.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.zeros(len(steps))
    return steps, values.mean(axis=0), error * (stdtrit(len(runs) - 1, 0.975) if len(runs) > 1 else 0.0)


def by_config(runs: list[Path]) -> dict[str, list[Path]]:
    """The runs that differ only in their seed, under a label for their curve. Example: {"debug_0 and 2 more": [...]}"""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        settings = json.loads((run / "config.json").read_text())
        same = {name: value for name, value in settings.items() if name not in OF_ONE_RUN}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    return {f"{one[0].name} and {len(one) - 1} more" if len(one) > 1 else one[0].name: one for one in groups.values()}


def draw(axes: plt.Axes, runs: list[Path], key: str, label: str, **style: str) -> None:
    """Draws the runs as one curve: their mean and, if they are several, its interval."""
    steps, means, half = mean_over_runs(runs, key)
    (line,) = axes.plot(steps, means, linewidth=1.5, label=label, **style)
    if len(runs) > 1:
        axes.fill_between(steps, means - half, means + half, color=line.get_color(), alpha=0.2, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; each becomes one line")
    parser.add_argument(
        "--over-seeds",
        action="store_true",
        help="runs that differ only in their seed become one line: their mean, with its 95 %% interval over runs",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="image file to write (.png or .svg; .png without an ending)"
    )
    args = parser.parse_args()
    if not args.output.suffix and not args.output.exists():
        args.output = args.output.with_suffix(".png")
    for file in ("metrics.jsonl", "config.json") if args.over_seeds else ("metrics.jsonl",):
        if missing := [str(run) for run in args.runs if not (run / file).is_file()]:
            parser.error(f"no {file} in {' '.join(missing)}: expected run folders, with jsonl among metrics.sinks")
    if args.output.exists() and not is_plot(args.output):
        parser.error(f"--output {args.output} is no plot: expected a new file, or an image by matplotlib")
    each = dict(zip(unique_names(args.runs), [[run] for run in args.runs]))
    try:
        if not any(series(run, key)[0] for run in args.runs for key in DRAWN):
            raise ValueError(f"they have neither {' nor '.join(DRAWN)}")
        plot(by_config(args.runs) if args.over_seeds else each, args.output)
    except Exception as error:  # a damaged line, an unknown kind of image, a folder that is not there
        names = ", ".join(map(str, args.runs))
        parser.error(f"cannot draw metrics.jsonl of {names} into {args.output}: {type(error).__name__}: {error}")
    print(args.output)


def plot(curves: dict[str, list[Path]], output: Path) -> None:
    """Draws a curve for each label's runs and writes the image."""
    figure, (reward, accuracy) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharex=True)
    for (label, runs), dashes in zip(curves.items(), itertools.cycle(("-", "--", "-.", ":"))):
        draw(reward, runs, DRAWN[0], label, linestyle=dashes)  # a curve under another one is seen between its dashes
        draw(accuracy, runs, DRAWN[1], label, linestyle=dashes, marker="o")
    reward.set(title="reward of sampled completions (mean of a step)", xlabel="step", ylabel="reward")
    accuracy.set(title="held-out accuracy (greedy)", xlabel="step", ylabel="accuracy", ylim=(0, 1.03))
    for axes in (reward, accuracy):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(accuracy.lines) > 1:
        accuracy.legend(loc="lower right", frameon=False)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
