"""Many steps of a run: whether memory or the time of a step grows.

    .venv/bin/python scripts/bench/long_run.py --steps 500
    .venv/bin/python scripts/bench/long_run.py --config debug_calculator --steps 100

Compares the medians of the first and the last fifth, of what the run itself records, once the first tenth is over. What follows
`--` goes to the run's command line.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import linear_regression, median

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-prompts-per-step", "4", "--evaluation.every", "0", "--checkpoint.interval", "100000"]
SERIES = {
    "memory GiB": "perf/peak_memory_gib",
    "step s": "time/step",
    "generate s": "time/generate",
    "train s": "time/train",
    "sync s": "time/sync",
    "unaccounted s": "time/unaccounted",
    "flush ms": "obs/overhead_ms",
    "completion tokens": "completions/length/mean",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="debug")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("options", nargs="*", help=f"of the run, after --; default {SMALL}")
    args = parser.parse_args()
    folder = ROOT / "outputs/bench/long_run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = ["--config", args.config, "--num-steps", str(args.steps), "--dump-folder", str(folder)]
    launch = [sys.executable, "-m", "torchtitan_rl.resilience.launch", "--standalone", "--nproc_per_node=1"]
    command = [*launch, "-m", "torchtitan_rl.train", *run, *(args.options or SMALL)]
    with open(folder.with_suffix(".log"), "w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"] > args.steps // 10]
    fifth = max(1, len(steps) // 5)
    print(
        f"{args.config}, {args.steps} steps; medians of steps {steps[0]['step']}-{steps[fifth - 1]['step']} and of the last {fifth}"
    )
    for name, key in SERIES.items():
        values = [step[key] for step in steps if key in step]
        slope = 100 * linear_regression(range(len(values)), values).slope
        print(
            f"{name:18s} {median(values[:fifth]):10.4f} {median(values[-fifth:]):10.4f}   {slope:+.4f} a hundred steps"
        )


if __name__ == "__main__":
    main()
