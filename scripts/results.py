"""Runs the grid of `scripts/results_cells.py` and prints a table: five seeds each, means with 95 % intervals.

    .venv/bin/python scripts/results.py --at-once 2                                  hours of two idle cores
    .venv/bin/python scripts/results.py --only grpo dapo --seeds 2 --steps 4 --output outputs/tiny
    .venv/bin/python scripts/results.py --table                                      of the runs that are there
    .venv/bin/python scripts/results.py --config qwen3_0_6b --target 0.6 --output outputs/results_0_6b       on a GPU

Each run is a folder of its own, OUTPUT/CELL/seed-N, which the report reads. The same command goes on where it stopped, and a run that
is done is not repeated. Each of the runs at once has its share of the cores; a run of several ranks has the machine to itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import ttest_ind

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "scripts" / "results_cells.py"
TRAIN = [sys.executable, "-m", "torchtitan_rl.command.command", "train"]
TARGET = 0.5
"""Held-out accuracy of counting to which steps and tokens are counted."""
RANKS = {"ahead_1": 2, "ahead_1_in_flight": 2, "ranks_2": 2, "ranks_4": 4}
"""The cells that say on how many ranks they run. Others run on one, or on each GPU."""


class Outcome(NamedTuple):
    """What one run has shown."""

    accuracy: float
    """Held-out, at the last evaluation."""
    steps_to_target: float
    """NaN if it was not reached."""
    tokens_to_target: float
    """Thousands of sampled tokens until then."""
    seconds: float
    """Of all steps, without evaluations."""
    mismatch: float
    """Mean of the largest difference of log-probabilities of each step."""


def cells() -> list[str]:
    """Returns the names of the grid's cells, in the order of the file."""
    lines = CELLS.read_text().splitlines()
    return [line[4:].partition("(")[0] for line in lines if line.startswith("def ") and not line.startswith("def _")]


def arguments(cell: str, seed: int, folder: Path, steps: int | None) -> list[str]:
    """Returns the arguments of one run. It goes on with a run that is there."""
    words = ["--config", f"{CELLS}:{cell}", "--seed", str(seed)]
    words += ["--dump-folder", str(folder), "--metrics.sinks", "jsonl"]
    return words + (["--num-steps", str(steps)] if steps else [])


def is_done(folder: Path) -> bool:
    """Returns whether a run has ended after its last step, with an evaluation."""
    end, metrics = folder / "end.json", folder / "metrics.jsonl"
    ended = end.is_file() and '"outcome": "done"' in end.read_text()
    return ended and metrics.is_file() and '"evaluation/accuracy"' in metrics.read_text()


class Runs:
    """Starts the grid's runs, and says for each how long it took and how many are left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.left = 0
        self.refused = False

    def run_all(self) -> int:
        """Runs what is not done, seed by seed, so that a grid that is cut off has as many seeds of each cell. Returns how many failed.

        Exits with 2 after a run that was refused for its config: the others would be refused too, and do not begin.
        """
        todo = [(cell, seed) for seed in range(self.args.seeds) for cell in self.args.only]
        todo = [(cell, seed) for cell, seed in todo if not is_done(self.folder(cell, seed))]
        self.left = len(todo)
        with ThreadPoolExecutor(self.args.at_once) as side_by_side:
            failed = sum(side_by_side.map(self.run, [one for one in todo if one[0] not in RANKS]))
        if self.refused:
            sys.exit(2)
        return failed + sum(self.run(one) for one in todo if one[0] in RANKS)

    def folder(self, cell: str, seed: int) -> Path:
        return self.args.output.resolve() / cell / f"seed-{seed}"

    def run(self, cell_and_seed: tuple[str, int]) -> bool:
        """Runs one cell with one seed. Several at once print into OUTPUT/CELL/seed-N.log. Returns whether it failed."""
        cell, seed = cell_and_seed
        if self.refused:
            return True
        folder = self.folder(cell, seed)
        environment = os.environ | {"RESULTS_CONFIG": self.args.config}
        if cell in RANKS:
            environment |= {"NGPU": str(RANKS[cell])}
        words, begin = [*TRAIN, *arguments(cell, seed, folder, self.args.steps)], time.monotonic()
        print(f"{cell}, seed {seed}: begins", flush=True)
        if self.args.at_once == 1 or cell in RANKS:
            code = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
        else:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // self.args.at_once)))
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{folder}.log", "w") as log:
                code = subprocess.run(words, cwd=ROOT, env=environment, check=False, stdout=log, stderr=log).returncode
        self.left -= 1
        self.refused = self.refused or code == 2
        ended = f"ended with {code}, see {folder}" if code else "done"
        print(f"{cell}, seed {seed}: {ended} after {time.monotonic() - begin:.0f} s, {self.left} runs left", flush=True)
        return code != 0


def outcome_of(folder: Path, target: float) -> Outcome:
    """Returns what a run's metrics.jsonl says. target: held-out accuracy to which steps and tokens are counted."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [(line["step"], line["evaluation/accuracy"]) for line in lines if "evaluation/accuracy" in line]
    reached = [step for step, accuracy in accuracies if accuracy >= target]
    diffs = [line["sampler/logprob_diff/max"] for line in lines if "sampler/logprob_diff/max" in line]
    sampled = sum(line.get("completions/tokens", 0.0) for line in lines if reached and line["step"] <= reached[0])
    return Outcome(
        accuracy=accuracies[-1][1],
        steps_to_target=reached[0] if reached else float("nan"),
        tokens_to_target=sampled / 1000 if reached else float("nan"),
        seconds=sum(line.get("time/step", 0.0) - line.get("time/evaluate", 0.0) for line in lines if line["step"] > 0),
        mismatch=float(np.mean(diffs)),
    )


def with_interval(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Returns the mean with its 95 % interval, by Student's t over seeds. Example: "45.2 ± 1.1"."""
    found = scale * np.array([value for value in values if np.isfinite(value)])
    if len(found) == 0:
        return "not reached"
    missing = f" ({len(found)} of {len(values)})" if len(found) < len(values) else ""
    if len(found) == 1:
        return f"{found[0]:.{digits}f}{missing}"
    half = stdtrit(len(found) - 1, 0.975) * found.std(ddof=1) / np.sqrt(len(found))
    return f"{found.mean():.{digits}f} ± {half:.{digits}f}{missing}"


def detectable(outcomes: dict[str, list[Outcome]]) -> float:
    """Returns the difference of accuracy between two cells that these seeds show with a power of 80 % at 5 %; NaN for one seed.

    (t_0.975 + t_0.8) s sqrt(2 / n), s the standard deviation within cells, pooled, and n the fewest seeds of a cell.
    """
    groups = [np.array([one.accuracy for one in found]) for found in outcomes.values() if len(found) > 1]
    if not groups:
        return float("nan")
    freedom = sum(len(group) - 1 for group in groups)
    pooled = np.sqrt(sum(((group - group.mean()) ** 2).sum() for group in groups) / freedom)
    return float((stdtrit(freedom, 0.975) + stdtrit(freedom, 0.8)) * pooled * np.sqrt(2 / min(map(len, groups))))


def against_first(outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    """Returns for each cell but the first the p-value that its mean accuracy differs from that of the first.

    Welch's t test, with Holm's correction for the number of cells. Cells of one seed are left out.
    """
    accuracies = {name: [one.accuracy for one in found] for name, found in outcomes.items() if len(found) > 1}
    names = list(accuracies)
    p = {name: ttest_ind(accuracies[names[0]], accuracies[name], equal_var=False).pvalue for name in names[1:]}
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1.0, p[name] * (len(p) - place)))
        corrected[name] = largest
    return corrected


def table(outcomes: dict[str, list[Outcome]], target: float) -> str:
    """Returns the table as markdown, and below it what difference the seeds can show, and which cells differ from the first."""
    lines = [
        f"| cell | seeds | held-out accuracy, % | steps to {target:.0%} | thousand tokens to it | least seconds of all steps | largest difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in outcomes.items():
        accuracy, steps, tokens, seconds, mismatch = zip(*found)
        reached = with_interval(steps), with_interval(tokens)
        row = (with_interval(accuracy, 100), *reached, f"{min(seconds):.0f}", f"{np.mean(mismatch):.1e}")
        lines.append(f"| {name} | {len(found)} | {' | '.join(row)} |")
    least = detectable(outcomes)
    if np.isfinite(least):
        lines += [
            "",
            f"Two cells that differ by less than {100 * least:.1f} points are not told apart by these seeds (power 80 %).",
        ]
    if found := [f"{name} {p:.3f}" for name, p in against_first(outcomes).items() if p < 0.05]:
        lines.append(
            f"Of other accuracy than {next(iter(outcomes))} (Welch's t, p corrected by Holm): {', '.join(found)}."
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=cells(), default=cells(), help="cells; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="0, 1, ... (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="default: those of the cell")
    parser.add_argument("--config", default="", help="in place of counting, for example qwen3_0_6b")
    parser.add_argument(
        "--target",
        type=float,
        default=TARGET,
        help="held-out accuracy to which steps are counted (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "results")
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs side by side on a CPU, of one rank each (default: %(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    for name in ("seeds", "steps", "at_once"):
        count = getattr(args, name)
        if count is not None and count < 1:
            parser.error(f"--{name.replace('_', '-')} {count}: expected at least 1")
    failed = 0 if args.table else Runs(args).run_all()
    outcomes = {}
    for cell in args.only:
        folders = [args.output / cell / f"seed-{seed}" for seed in range(args.seeds)]
        for folder in folders:
            if folder.is_dir() and not is_done(folder):
                print(f"left out: {folder} has no run that is done, with an evaluation", file=sys.stderr)
        if done := [outcome_of(folder, args.target) for folder in folders if is_done(folder)]:
            outcomes[cell] = done
    if args.table and not outcomes:
        parser.error(
            f"no run of {', '.join(args.only)} is done in {args.output}: run without --table, or name another --output"
        )
    print(table(outcomes, args.target))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
