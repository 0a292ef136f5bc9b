"""Plot a run's reward and held-out accuracy over its steps, from its metrics.jsonl.

.venv/bin/python scripts/plot_run.py outputs/debug-20261120-130000 [MORE_RUNS ...] --output curve.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def series(run: Path, key: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values) of one metric, for the steps that have it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def is_plot(path: Path) -> bool:
    """Returns whether matplotlib has written a file: it says so in every image."""
    return path.is_file() and b"matplotlib" in path.read_bytes().lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; each becomes one line")
    parser.add_argument("--output", type=Path, required=True, help="image file to write (.png or .svg)")
    args = parser.parse_args()
    if missing := [str(run) for run in args.runs if not (run / "metrics.jsonl").is_file()]:
        parser.error(f"no metrics.jsonl in {' '.join(missing)}: expected run folders, with jsonl among metrics.sinks")
    if args.output.exists() and not is_plot(args.output):
        parser.error(f"--output {args.output} is no plot: expected a new file, or an image by matplotlib")
    figure, (reward, accuracy) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for run in args.runs:
        reward.plot(*series(run, "reward/mean"), linewidth=1.5, label=run.name)
        accuracy.plot(*series(run, "evaluation/accuracy"), marker="o", linewidth=1.5, label=run.name)
    reward.set(title="reward of sampled completions (mean of a step)", xlabel="step", ylabel="reward")
    accuracy.set(title="held-out accuracy (greedy)", xlabel="step", ylabel="accuracy", ylim=(0, 1.03))
    for axes in (reward, accuracy):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(args.runs) > 1:
        accuracy.legend(loc="lower right", frameon=False)
    figure.savefig(args.output, dpi=130)
    print(args.output)


if __name__ == "__main__":
    main()
