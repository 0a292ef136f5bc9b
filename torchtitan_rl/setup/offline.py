"""The commands `torchtitan-rl evaluate`, `export` and `estimate`: their options, read before anything heavy is imported."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.setup.node import environment_kind, gpu_count

EVALUATE = """Evaluate a model or a run's checkpoint as in training: accuracy, mean@n, pass@k, confidence intervals, and failures.

    torchtitan-rl evaluate outputs/debug-20261120-130000 [--step 40]
    torchtitan-rl evaluate /models/Qwen3-0.6B --config sums --evaluation.num-prompts 500

A run is evaluated with the options it was started with, a model with the given --config. Further options override the
config, as with run_train.sh. For a run, relative paths in options are relative to the folder the run was started from.
The results are printed and written to OUTPUT/evaluation/step-0.json.
"""

EXPORT = """Export a run's checkpoint to a Hugging Face folder for transformers and vLLM. Needs no GPU, and memory for one file.

torchtitan-rl export --run outputs/debug-20261120-130000 --output exported/ [--step 100]

A run with LoRA gives an adapter folder in float32, for peft and vLLM; with --merged, the base with the adapter in it.
"""

ESTIMATE = """Estimate the time of a config's step and its memory, without starting a run.

    torchtitan-rl estimate --config qwen3_8b --gpus 8 --gpu H100
    torchtitan-rl estimate --config debug --gpus 1 --gpu here --prompt-tokens 13 --completion-tokens 26
    torchtitan-rl estimate --config sft --model 1.7B
    torchtitan-rl estimate --config my_configs.py:distilled --teacher 8B

The lower bound of each part comes from torchtitan_rl/observability/metrics/efficiency.py. The expected time is the
bound divided by the efficiency that a machine reaches (--decode-share, --train-share, --sync-share; a run reports them
as efficiency/*). The estimate assumes completions of equal length and communication hidden behind computation. It
leaves out rewards and prefill. A prompt is counted once for each completion. Demonstrations are neither sampled nor pushed.

With --run FOLDER, it also says how much faster than waiting for each step's longest completion the run would have sampled
with groups in flight, from the lengths of its own completions:

    torchtitan-rl estimate --config debug --gpus 1 --run outputs/debug-20261122-230949

With --curve it prints a config's step from 1 to 1,024 H100 by parts, each with its best layout (docs/performance.md). The lengths are
log-normal with the mean --completion-tokens:

    torchtitan-rl estimate --config qwen3_8b --curve --completion-tokens 2048 --sequences 4096
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names."""
    name, *rest = sys.argv[1:] if arguments is None else arguments
    description = {"evaluate": EVALUATE, "export": EXPORT, "estimate": ESTIMATE}[name]
    parser = argparse.ArgumentParser(
        prog=f"torchtitan-rl {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    {"evaluate": _add_evaluate, "export": _add_export, "estimate": _add_estimate}[name](parser)
    if name == "evaluate":
        args, overrides = parser.parse_known_args(rest)
        args.overrides = overrides
    else:
        args = parser.parse_args(rest)
    importlib.import_module(f"torchtitan_rl.setup.{name}").run(args, parser)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    gpus = gpu_count() if environment_kind() == "gpu" else 0
    parser.add_argument("model_or_run", help="a run's folder, a Hugging Face folder, or a name on the hub")
    parser.add_argument("--step", type=int, help="for a run: the checkpoint's step; default: the last")
    parser.add_argument("--output", help="folder for the results; default: a new one under outputs/")
    parser.add_argument("--nproc", type=int, default=max(gpus, 1), help="number of ranks; default: one per GPU, or 1")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--step", type=int, help="the checkpoint's step; default: the last")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--merged", action="store_true", help="with LoRA: the merged model, added up in float32")


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True)
    parser.add_argument("--model", help="the policy: a folder, or a size of Qwen3 such as 1.7B; default: the config's")
    parser.add_argument(
        "--teacher", help="the teacher: a folder, or a size of Qwen3 such as 8B; default: the config's folder"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu", choices=["A100", "H100", "H200", "B200", "here"], default="H100")
    parser.add_argument("--prompt-tokens", type=int, help="default: half of prompts.max_prompt_tokens")
    parser.add_argument("--completion-tokens", type=int, help="default: sampling.max_tokens")
    parser.add_argument("--decode-share", type=float, help="default: 0.3, or 0.2 on a CPU")
    parser.add_argument("--train-share", type=float, help="default: 0.4, or 0.35 on a CPU")
    parser.add_argument("--sync-share", type=float, help="default: 0.3, or 0.01 on a CPU")
    parser.add_argument("--run", type=Path, help="a run's folder, for the gain of groups in flight")
    parser.add_argument("--curve", action="store_true", help="from 1 to 1,024 H100, by parts")
    parser.add_argument("--sequences", type=int, help="with --curve; default: those of the config's step")


if __name__ == "__main__":
    main()
