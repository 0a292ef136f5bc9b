"""`--help` of a config: the fields that most people change; `--help all`: every field, as tyro shows them."""

import textwrap
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

MOST_CHANGED = {
    "hf_assets_path": "model: a folder, or a name on the hub",
    "task.path": "rows: a file, a folder, or a data set on the hub",
    "task.held_out_path": "rows to evaluate on; empty: some of the others",
    "task.answer_kind": "how an answer is read; auto: by the rows",
    "dump_folder": "run's folder; one with a run continues it",
    "num_steps": "steps of the whole run",
    "num_prompts_per_step": "prompts in a step",
    "sampling.n": "completions of a prompt",
    "sampling.max_tokens": "longest completion, in tokens",
    "generator.max_model_len": "longest prompt with completion, in tokens",
    "trainer.optimizer.lr": "peak learning rate",
    "grader.rewards": "own reward functions: FILE.py:FUNCTION",
    "evaluation.every": "steps between evaluations; 0: none",
    "checkpoint.interval": "steps between checkpoints",
    "metrics.sinks": "where metrics and samples go",
}
"""The fields of the first screen, if a config has them, and their meaning in a few words."""

TYRO = (tyro.conf.AvoidSubcommands,)
"""How tyro reads and describes a config."""


def show_help(command: str, description: str, config: "RunConfig", *, every_field: bool) -> None:
    """Print the help of a config with its values: every field, or those of MOST_CHANGED. `description`: of its function."""
    from torchtitan_rl import device  # it imports torch

    about = " ".join(description.partition("\n\n")[0].split())
    if every_field:
        options = {"prog": command, "description": about, "config": TYRO}
        tyro.cli(type(config), default=config, args=["--help"], **options)
    print(f"usage: {command} [--FIELD VALUE ...]", *textwrap.wrap(about, 80), sep="\n", end="\n\n")
    here = "where there is no GPU" if device.FOR_CPU else "on a GPU"
    print(f"Fields most people change, with this config's values {here}:")
    for path, meaning in MOST_CHANGED.items():
        try:
            value = attrgetter(path)(config)
        except AttributeError:  # another task's
            continue
        if isinstance(value, (list, tuple)):
            value = " ".join(map(str, value))
        option = f"--{path.replace('_', '-')} {value}"
        gap = "\n" + 36 * " " if len(option) > 34 else ""
        print(f"  {option:34}{gap}  {meaning}")
    others = [f"task.{each.name}" for each in fields(config.task)]
    options = [f"--{path.replace('_', '-')}" for path in others if path not in MOST_CHANGED]
    print(
        *textwrap.wrap(f"The task's others: {' '.join(options)}", 80, break_on_hyphens=False),
        sep="\n",
    )
    print(
        "\n--help all: every field; --print-config: the config as JSON; --dry-run: what a\n"
        "run would do (8x80 after one of these: on 8 GPUs of 80 GB); --preview: answers;\n"
        "--list-configs: other names for --config, which also takes FILE.py:FUNCTION."
    )
