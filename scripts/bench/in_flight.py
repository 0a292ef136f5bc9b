"""Whole runs that wait for each step's longest completion against runs with groups in flight, on debug_in_flight's long tail.

    .venv/bin/python scripts/bench/in_flight.py --ranks 1 2 --seeds 0 1 2 --steps 40
    .venv/bin/python scripts/bench/in_flight.py --fixed-policy --steps 125

Tokens a second are the sampled tokens over the seconds of generation, from the third step on. --fixed-policy trains with a learning
rate of 0, so that both runs sample from the same policy, and compares what they trained on: the Kolmogorov-Smirnov test of the
groups' mean length, longest length and mean reward.
"""

import argparse
import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from scipy.stats import ks_2samp

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs/bench/in_flight"
SIDES = {"waits": 0, "in flight": 24}
FIRST = 3
"""The first step that counts: the engine and the learning have begun."""


def run(side: str, *, ranks: int, seed: int, steps: int, more: Sequence[str] = ()) -> Path:
    """Train, and return the run's folder."""
    folder = FOLDER / f"{side.replace(' ', '-')}-{ranks}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    options = {"config": "debug_in_flight", "in-flight.prompts": SIDES[side], "seed": seed, "num-steps": steps}
    options |= {"dump-folder": folder, "checkpoint.interval": 1000, "evaluation.every": steps}
    told = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "w") as log:
        environment = {**os.environ, "NGPU": str(ranks)}
        command = ["./run_train.sh", *told, *more]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
    return folder


def steps_of(folder: Path) -> list[dict]:
    """Returns the metrics of the run's training steps."""
    return [
        row for line in (folder / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))["step"] > 0
    ]


def speed(steps: Sequence[dict]) -> float:
    """Returns the sampled tokens a second of generation."""
    counted = [row for row in steps if row["step"] >= FIRST]
    return sum(row["completions/tokens"] for row in counted) / sum(row["time/generate"] for row in counted)


def compare_speed(ranks: Sequence[int], seeds: Sequence[int], steps: int) -> None:
    """Print tokens a second and final accuracy of both sides, one seed after another, the sides in turn."""
    print("ranks seed  side        tokens/s  step s  carried  oldest  accuracy")
    for number in ranks:
        ratios = []
        for seed in seeds:
            found = {}
            for side in SIDES if seed % 2 == 0 else reversed(SIDES):
                rows = steps_of(run(side, ranks=number, seed=seed, steps=steps))
                found[side] = speed(rows)
                carried = fmean(row.get("in_flight/carried_tokens_fraction", 0.0) for row in rows)
                oldest = max(row.get("in_flight/age/max", 0) for row in rows)
                took = median(row["time/step"] for row in rows)
                print(
                    f"{number:5d} {seed:4d}  {side:10s} {found[side]:9.0f} {took:7.2f} {carried:7.0%} {oldest:7.0f} "
                    f"{rows[-1]['evaluation/accuracy']:9.1%}",
                    flush=True,
                )
            ratios.append(found["in flight"] / found["waits"])
        print(
            f"{number} ranks: {', '.join(f'{ratio:.2f}' for ratio in ratios)} x tokens a second in flight", flush=True
        )


def groups_of(folder: Path) -> list[dict[str, float]]:
    """Returns each trained group's mean length, longest length and mean reward."""
    groups: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for row in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        if row["split"] == "train":
            groups[row["step"], row["prompt_idx"]].append(row)
    return [
        {
            "mean length": fmean(row["response_tokens"] for row in rows),
            "longest length": max(row["response_tokens"] for row in rows),
            "mean reward": fmean(row["reward"] for row in rows),
        }
        for rows in groups.values()
    ]


def compare_distributions(steps: int) -> None:
    """Print the Kolmogorov-Smirnov tests of what both sides trained on, with the policy held fixed."""
    more = ["--trainer.optimizer.lr", "0", "--sampling.n", "2", "--metrics.keep-all-rows", "--metrics.no-report"]
    found = {side: groups_of(run(side, ranks=1, seed=0, steps=steps, more=more)) for side in SIDES}
    for name in ("mean length", "longest length", "mean reward"):
        values = [[group[name] for group in groups] for groups in found.values()]
        test = ks_2samp(*values)
        means = " and ".join(f"{fmean(of):.3f}" for of in values)
        print(
            f"{name}: {' and '.join(str(len(of)) for of in values)} groups, means {means}, D {test.statistic:.4f}, p {test.pvalue:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fixed-policy", action="store_true", help="compare distributions instead of speed")
    args = parser.parse_args()
    if args.fixed_policy:
        compare_distributions(args.steps)
    else:
        compare_speed(args.ranks, args.seeds, args.steps)


if __name__ == "__main__":
    main()
