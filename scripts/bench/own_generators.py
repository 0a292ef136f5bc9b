"""Whole runs whose ranks sample and train in turn against runs with generators on ranks of their own, on debug_in_flight's long tail.

    .venv/bin/python scripts/bench/own_generators.py                    about twelve minutes of two idle cores
    .venv/bin/python scripts/bench/own_generators.py --ranks 8 --steps 20

All sides have the same ranks and cores, and otherwise their own defaults. They run in turn, the second time in reverse order. A step's
time is the median from the third step on, tokens a second are those sampled over the steps' time, and idle is each side's mean share.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.in_flight import FIRST, run, steps_of
from scripts.bench.measure import machine_line

HEADER = "| ranks | step, s | tokens a second | trainers idle, % | generators idle, % |\n|---|---|---|---|---|"


def sides_of(ranks: int) -> dict[str, dict[str, int]]:
    """Returns each side's options by its name: colocated, and half of the ranks in turns and one step ahead."""
    half = ranks // 2
    apart = {
        f"{ranks - half} + {half}, ahead {ahead}": {"generator.ranks": half, "generator.ahead": ahead}
        for ahead in (0, 1)
    }
    return {f"{ranks}, colocated": {}} | apart


def row(name: str, steps: Sequence[dict]) -> str:
    """Returns the table's row of a side's counted steps."""
    seconds = [step["time/step"] for step in steps]
    tokens = sum(step["completions/tokens"] for step in steps) / sum(seconds)
    idle = [[step[key] for step in steps if key in step] for key in ("idle/trainer", "idle/generator")]
    shares = " | ".join(f"{100 * fmean(values):.0f}" if values else "" for values in idle)
    return f"| {name} | {median(seconds):.2f} | {tokens:,.0f} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    shared = {"num-steps": args.steps, "in-flight.prompts": 0, "evaluation.every": 0}
    print(machine_line(), HEADER, sep="\n", flush=True)
    for ranks in args.ranks:
        sides = sides_of(ranks)
        found: dict[str, list[dict]] = {name: [] for name in sides}
        for repeat in range(args.repeats):
            for name in sides if repeat % 2 == 0 else reversed(sides):
                steps = steps_of(run(f"own_generators/{name}", ranks=ranks, **shared, **sides[name]))
                found[name] += [step for step in steps if step["step"] >= FIRST]
        for name, steps in found.items():
            print(row(name, steps), flush=True)


if __name__ == "__main__":
    main()
