"""Whole runs that wait for each step's longest completion against runs with groups in flight, on debug_in_flight's long tail.

    .venv/bin/python scripts/bench/in_flight.py --ranks 1 2 --seeds 0 1 2 --steps 80
    .venv/bin/python scripts/bench/in_flight.py --seeds 0 1 2 --steps 80 --max-ages 1 8 --prompts 32
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scipy.stats import ks_2samp

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs/bench"
FIRST = 3
"""The first step that counts: the engine and the learning have begun."""

Sides = Mapping[str, Mapping[str, Any]]
"""The options of each side of the comparison, by its name."""


def sides_of(prompts: int, max_ages: Sequence[int]) -> Sides:
    """Returns the side that waits, and one with `prompts` in flight for each age."""
    in_flight = {f"age {age}": {"in-flight.prompts": prompts, "in-flight.max-age": age} for age in max_ages}
    return {"waits": {"in-flight.prompts": 0}} | in_flight


def run(name: str, *, ranks: int, more: Sequence[str] = (), **options: Any) -> Path:
    """Train, and return the run's folder."""
    folder = FOLDER / name.replace(",", "").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    options = {"config": "debug_in_flight", "dump-folder": folder, "checkpoint.interval": 1000} | options
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


def compare(sides: Sides, *, ranks: Sequence[int], seeds: Sequence[int], steps: int, every: int, held_out: int) -> None:
    """Print tokens a second and accuracies of all sides, one seed after another, the sides in turn."""
    print("ranks seed  side     tokens/s  step s  carried  oldest  held-out accuracy")
    for number in ranks:
        speeds = defaultdict(list)
        for seed in seeds:
            for side in sides if seed % 2 == 0 else reversed(sides):
                shared = {"seed": seed, "num-steps": steps, "evaluation.every": every or steps}
                options = sides[side] | shared | {"evaluation.num-prompts": held_out}
                rows = steps_of(run(f"in_flight/{side}-{number}-{seed}", ranks=number, **options))
                speeds[side].append(speed(rows))
                carried = fmean(row.get("in_flight/carried_tokens_fraction", 0.0) for row in rows)
                oldest = max(row.get("in_flight/age/max", 0) for row in rows)
                took = median(row["time/step"] for row in rows)
                found = {row["step"]: row["evaluation/accuracy"] for row in rows if "evaluation/accuracy" in row}
                print(
                    f"{number:5d} {seed:4d}  {side:7s} {speeds[side][-1]:9.0f} {took:7.2f} {carried:7.0%} {oldest:7.0f}  "
                    + "  ".join(f"step {step} {accuracy:.1%}" for step, accuracy in found.items()),
                    flush=True,
                )
        for side in sides.keys() - {"waits"}:
            ratios = [mine / waits for mine, waits in zip(speeds[side], speeds["waits"], strict=True)]
            print(f"{number} ranks, {side}: {', '.join(f'{one:.2f}' for one in ratios)} x tokens a second", flush=True)


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


def compare_distributions(sides: Sides, steps: int) -> None:
    """Print the Kolmogorov-Smirnov tests of what both sides trained on, with the policy held fixed."""
    more = ["--metrics.keep-all-rows", "--metrics.no-report"]
    fixed = {"trainer.optimizer.lr": 0, "sampling.n": 2, "num-steps": steps, "evaluation.every": steps}
    found = {
        side: groups_of(run(f"in_flight/{side}", ranks=1, more=more, **fixed, **options))
        for side, options in sides.items()
    }
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
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=24, help="in flight; a step takes 16")
    parser.add_argument("--max-ages", type=int, nargs="+", default=[4], help="each is a side")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps; 0: after the last one")
    parser.add_argument("--held-out", type=int, default=256, help="prompts of an evaluation")
    parser.add_argument("--fixed-policy", action="store_true", help="compare distributions instead of speed")
    args = parser.parse_args()
    if args.fixed_policy:
        return compare_distributions(sides_of(args.prompts, args.max_ages[:1]), args.steps)
    sides, held_out = sides_of(args.prompts, args.max_ages), args.held_out
    return compare(
        sides, ranks=args.ranks, seeds=args.seeds, steps=args.steps, every=args.evaluate_every, held_out=held_out
    )


if __name__ == "__main__":
    main()
