"""Evaluates a model or a run's checkpoint as in training: the command `torchtitan-rl evaluate`."""

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
from typing import NoReturn

from torchtitan_rl.core import device  # noqa: F401  (before torchtitan and vLLM)

# isort: split

from torchtitan_rl.core.errors import UserError
from torchtitan_rl.library.references import CALLER_FOLDER
from torchtitan_rl.setup.export import ROOT, export
from torchtitan_rl.setup.registry import parse_args
from torchtitan_rl.setup.secrets import HIDDEN

NOT_OF_AN_EVALUATION = {
    "--dump-folder",
    "--hf-assets-path",
    "--trainer.lora.start",
    "--checkpoint.load-step",
    "--resume",
}


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> NoReturn:
    """The command: ends with the evaluation's exit code."""
    overrides = args.overrides
    output = Path.cwd() / (args.output or f"outputs/evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        parser.error(f"--output {output} exists already: expected a new folder")
    source = Path(args.model_or_run)
    is_run = (source / "environment.json").is_file()
    if args.step is not None and not is_run:
        parser.error(f"--step {args.step}: expected a run's folder, but {source} is none, so it has no checkpoints")
    if args.nproc < 1:
        parser.error(f"--nproc {args.nproc}: expected 1 or more")
    if not source.exists() and source.parent.is_dir():  # otherwise it may be a name on the hub
        parser.error(
            f"{source.parent.absolute()} has no {source.name}: expected a run's folder, a model folder, or a name on the hub"
        )
    with tempfile.TemporaryDirectory() as folder:
        model, command, caller, adapter = args.model_or_run, [], str(Path.cwd()), []
        if is_run:
            try:
                model, (command, caller) = f"{folder}/model", command_of(source)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                parser.error(f"{source}/config.json is not as a run writes it: {type(error).__name__}: {error}")
            if lost := hidden_options(command) - {option.partition("=")[0] for option in overrides}:
                parser.error(
                    f"the run's config.json has {HIDDEN} for a secret in {', '.join(sorted(lost))}: pass it again"
                )
            command = without(command, {one.partition("=")[0].replace("_", "-") for one in overrides} - {"--config"})
            try:
                with chdir(ROOT):  # as the evaluation itself, and before the export, which takes longer
                    os.environ[CALLER_FOLDER] = caller
                    parse_args([*command, *overrides])
                base = export(source, Path(model), args.step, "float32", merged=False)
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
