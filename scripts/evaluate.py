"""Evaluate a model or a run's checkpoint as in training: accuracy, mean@n, pass@k, confidence intervals, and failures.

    .venv/bin/python scripts/evaluate.py outputs/debug-20261120-130000 [--step 40]
    .venv/bin/python scripts/evaluate.py /models/Qwen3-0.6B --config sums --evaluation.num-prompts 500

A run is evaluated with the options it was started with, a model with the given --config. Further options override the
config, as with run_train.sh. For a run, relative paths in options are relative to the folder the run was started from.
The results are printed and written to OUTPUT/evaluation/step-0.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import chdir
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torchtitan_rl.core import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402

from scripts.export_hf import export  # noqa: E402
from torchtitan_rl.core.errors import UserError  # noqa: E402
from torchtitan_rl.library.references import CALLER_FOLDER  # noqa: E402
from torchtitan_rl.setup.registry import parse_args  # noqa: E402
from torchtitan_rl.setup.secrets import HIDDEN  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NOT_OF_AN_EVALUATION = {
    "--dump-folder",
    "--hf-assets-path",
    "--trainer.lora.start",
    "--checkpoint.load-step",
    "--resume",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_or_run", help="a run's folder, a Hugging Face folder, or a name on the hub")
    parser.add_argument("--step", type=int, help="for a run: the checkpoint's step; default: the last")
    parser.add_argument("--output", help="folder for the results; default: a new one under outputs/")
    parser.add_argument(
        "--nproc", type=int, default=torch.cuda.device_count() or 1, help="number of ranks; default: one per GPU, or 1"
    )
    args, overrides = parser.parse_known_args()
    output = Path.cwd() / (args.output or f"outputs/evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        parser.error(f"--output {output} exists already: expected a new folder")
    run = Path(args.model_or_run)
    is_run = (run / "environment.json").is_file()
    if args.step is not None and not is_run:
        parser.error(f"--step {args.step}: expected a run's folder, but {run} is none, so it has no checkpoints")
    if args.nproc < 1:
        parser.error(f"--nproc {args.nproc}: expected 1 or more")
    if not run.exists() and run.parent.is_dir():  # otherwise it may be a name on the hub
        parser.error(
            f"{run.parent.absolute()} has no {run.name}: expected a run's folder, a model folder, or a name on the hub"
        )
    with tempfile.TemporaryDirectory() as folder:
        model, command, caller, adapter = args.model_or_run, [], str(Path.cwd()), []
        if is_run:
            try:
                model, (command, caller) = f"{folder}/model", command_of(run)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                parser.error(f"{run}/config.json is not as a run writes it: {type(error).__name__}: {error}")
            if lost := hidden_options(command) - {option.partition("=")[0] for option in overrides}:
                parser.error(
                    f"the run's config.json has {HIDDEN} for a secret in {', '.join(sorted(lost))}: pass it again"
                )
            command = without(command, {one.partition("=")[0].replace("_", "-") for one in overrides} - {"--config"})
            try:
                with chdir(ROOT):  # as the evaluation itself, and before the export, which takes longer
                    os.environ[CALLER_FOLDER] = caller
                    parse_args([*command, *overrides])
                base = export(run, Path(model), args.step, "float32", merged=False)
            except UserError as error:
                parser.error(str(error))
            if base:
                model, adapter = str(base.resolve()), ["--trainer.lora.start", model]
        command += [*overrides, *adapter, "--hf-assets-path", model, "--dump-folder", str(output), "--eval-only"]
        launch = ["-m", "torchtitan_rl.resilience.launch", "--standalone", f"--nproc_per_node={args.nproc}"]
        environment = {**os.environ, CALLER_FOLDER: caller}
        launch = [sys.executable, *launch, "-m", "torchtitan_rl.train", *command]
        sys.exit(subprocess.run(launch, cwd=ROOT, env=environment).returncode)


def command_of(run: Path) -> tuple[list[str], str]:
    """Returns the run's options without its start and output folders, and the folder that it was called from."""
    described = json.loads((run / "config.json").read_text())
    _, *options = described["command"]
    return without(options, NOT_OF_AN_EVALUATION), described.get("folder_of_command", str(Path.cwd()))


def without(options: list[str], names: Collection[str]) -> list[str]:
    """Returns the options without those of these names, and without their values."""
    kept, leaves_out = [], False
    for word in options:
        leaves_out = word.partition("=")[0].replace("_", "-") in names if word.startswith("--") else leaves_out
        if not leaves_out:
            kept.append(word)
    return kept


def hidden_options(options: list[str]) -> set[str]:
    """Returns the options whose values were replaced because they contain a secret."""
    found, name = set(), ""
    for option in options:
        name = option.partition("=")[0] if option.startswith("--") else name
        if HIDDEN in option:
            found.add(name)
    return found


if __name__ == "__main__":
    main()
