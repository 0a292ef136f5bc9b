"""Learning curves of the cell `grpo` of scripts/results.py and of TRL's GRPOTrainer, on one clock.

    .venv/bin/python scripts/bench/learn_vs_trl.py --seeds 3           half an hour of an idle machine
    .venv/bin/python scripts/bench/learn_vs_trl.py --seeds 1 --steps 2 --output outputs/tiny
    .venv/bin/python scripts/bench/learn_vs_trl.py --config smollm2 --target 0.45 --seeds 1 --output outputs/smollm2_vs_trl \\
        --trl compute=bfloat16                                                an hour of an idle machine
    .venv/bin/python scripts/bench/learn_vs_trl.py --table             of the runs that are there

Our runs are those of `scripts/results.py --only grpo`, in OUTPUT/grpo/seed-N; TRL's are in OUTPUT/trl/seed-N. TRL gets the same
start, prompts in the same order, rewards, learning rate of each step and hyper-parameters, and answers the same held-out prompts
greedily. A step's seconds are everything from the end of the step before, without evaluations. Each side has its own default
settings otherwise: TRL pads, takes 8 sequences at once with gradient checkpointing, generates with transformers on a CPU and with
its colocated vLLM on a GPU; ours saves checkpoints, and draws other samples. Runs take turns, and one that is done is not repeated.
TRL's environment is that of step_vs_trl.py. On a machine that has other work, set OMP_WAIT_POLICY=PASSIVE: TRL's threads spin, and a
step then takes minutes. `run_train.sh --config scripts/results_cells.py:grpo --hf-assets-path OUTPUT/trl/seed-N/model --eval-only`
evaluates TRL's last weights with our engine.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.results import TARGET, TRAIN, arguments, is_done, with_interval  # noqa: E402

CELL = "grpo"
NAMES = {"ours": CELL, "TRL": "trl"}
"""The folder of each side's runs."""


class Curve(NamedTuple):
    """What one run has shown."""

    accuracies: dict[int, float]
    """Held-out, by step."""
    seconds: dict[int, float]
    """Of each step, without evaluation."""

    def seconds_to(self, accuracy: float) -> float:
        """Seconds of the steps up to the first evaluation that reached `accuracy`; NaN if none did."""
        reached = [step for step, found in self.accuracies.items() if found >= accuracy]
        return sum(took for step, took in self.seconds.items() if step <= reached[0]) if reached else float("nan")


def curve_of(folder: Path) -> Curve:
    """Returns what a run's metrics.jsonl says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["step"]: line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line}
    seconds = {
        line["step"]: line["time/step"] - line.get("time/evaluate", 0.0) for line in lines if "time/step" in line
    }
    return Curve(accuracies, seconds)


def table(curves: dict[str, list[Curve]], target: float) -> str:
    """Returns the table as markdown, with the steps at which all runs have evaluated. Both sides have the same seeds in one order."""
    runs = [curve for found in curves.values() for curve in found]
    at = [step for step in runs[0].accuracies if all(step in run.accuracies for run in runs)]
    lines = [
        f"| held-out accuracy, % | seeds | {' | '.join(f'step {step}' for step in at)} | seconds to {target:.0%} | seconds of all steps |",
        "|---" * (len(at) + 4) + "|",
    ]
    for name, found in curves.items():
        cells = [with_interval([curve.accuracies[step] for curve in found], 100) for step in at]
        cells.append(with_interval([curve.seconds_to(target) for curve in found]))
        cells.append(with_interval([sum(curve.seconds.values()) for curve in found]))
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    pairs = list(zip(curves["ours"], curves["TRL"]))
    last = [ours.accuracies[at[-1]] - trl.accuracies[at[-1]] for ours, trl in pairs]
    ratio = [sum(trl.seconds.values()) / sum(ours.seconds.values()) for ours, trl in pairs]
    return "\n".join([
        *lines, "",
        f"Ours minus TRL at step {at[-1]}, seed by seed: {with_interval(last, 100)} points.",
        f"TRL's steps take {with_interval(ratio, digits=2)} times as long.",
    ])  # fmt: skip


def job_of(seed: int, ours: Path, folder: Path, settings: list[str]) -> dict:
    """Returns TRL's side of our run in the folder `ours`."""
    from scripts.bench.step_vs_trl import TRL
    from scripts.bench.step_vs_trl import settings as over
    from torchtitan_rl.build import build_prompts, resolve
    from torchtitan_rl.command.registry import parse_args
    from torchtitan_rl.run.start_checkpoint import load_tokenizer

    _, config = parse_args(arguments(CELL, seed, ours, None))
    resolved = resolve(config, world_size=1)
    config = resolved.config
    stream, held_out, _ = build_prompts(resolved, load_tokenizer(config.hf_assets_path))
    lines = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    rates = [line["optimizer/learning_rate"] for line in lines if line["step"] > 0]
    prompts = stream.next_batch(len(rates) * config.num_prompts_per_step)
    return {
        "model": str(Path(config.hf_assets_path).resolve()),
        "folder": str(folder.resolve()),
        "task": type(resolved.task).__name__,
        "prompts": [{"prompt": each.text, "expected_answer": each.expected_answer} for each in prompts],
        "held_out": [{"prompt": each.text, "expected_answer": each.expected_answer} for each in held_out],
        "evaluate_every": config.evaluation.every,
        "prompts_per_step": config.num_prompts_per_step,
        "n": config.sampling.n,
        "new_tokens": config.sampling.max_tokens,
        "ends": True,
        "learning_rates": rates,
        "hyperparameters": hyperparameters(config, len(rates)),
        "trl": over(TRL, ["sequences_at_once=8", "checkpointing=yes", *settings]),
    }


def hyperparameters(config, num_steps: int) -> dict[str, float | str]:
    """Returns our config in TRL's words. The loss of the cell is TRL's "grpo": a mean over sequences of means over tokens."""
    optimizer, algorithm = config.trainer.optimizer, config.algorithm
    return {
        "seed": config.seed, "max_steps": num_steps, "temperature": config.sampling.temperature,
        "learning_rate": optimizer.lr, "weight_decay": optimizer.weight_decay, "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1], "adam_epsilon": optimizer.eps, "max_grad_norm": config.trainer.max_norm,
        "loss_type": "grpo", "scale_rewards": "group", "beta": algorithm.kl.coef, "epsilon": algorithm.loss.eps_low,
        "epsilon_high": algorithm.loss.eps_high,
    }  # fmt: skip


def run_trl(job: dict) -> int:
    """Runs TRL's side. Returns its exit code."""
    from scripts.bench.step_vs_trl import trl_python

    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    words = [str(trl_python()), str(Path(__file__).with_name("side_trl_learn.py")), str(folder / "job.json")]
    with (folder / "log").open("w") as log:
        return subprocess.run(words, stdout=log, stderr=log, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ... (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of our new runs, and so of TRL's; default: those of the cell")
    parser.add_argument(
        "--config", default="", help="base of the cell, of the task Counting or PlainSums; default: counting"
    )
    parser.add_argument(
        "--target", type=float, default=TARGET, help="held-out accuracy that is timed (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "results")
    parser.add_argument("--trl", nargs="+", default=[], metavar="KEY=VALUE", help="as of step_vs_trl.py")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    os.environ["RESULTS_CONFIG"] = args.config
    for seed in range(0 if args.table else args.seeds):
        ours, trl = (args.output.resolve() / name / f"seed-{seed}" for name in NAMES.values())
        if not is_done(ours):
            print(f"ours, seed {seed}", flush=True)
            subprocess.run([*TRAIN, *arguments(CELL, seed, ours, args.steps)], cwd=ROOT, check=True)
        if not is_done(trl):
            print(f"TRL, seed {seed}", flush=True)
            if run_trl(job_of(seed, ours, trl, args.trl)):
                sys.exit(f"TRL's run ended: see {trl / 'log'}")
    folders = [[args.output / name / f"seed-{seed}" for name in NAMES.values()] for seed in range(args.seeds)]
    done = [pair for pair in folders if all(map(is_done, pair))]
    if not done:
        parser.error(f"no seed has both runs in {args.output}: run without --table, or name another --output")
    curves = {name: [curve_of(pair[place]) for pair in done] for place, name in enumerate(NAMES)}
    print(table(curves, args.target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
