"""`--help` of a config: one screen of the fields that most people change and the groups; `--help all`: every field."""

import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
from operator import attrgetter
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

MOST_CHANGED = {
    "hf_assets_path": "model: a folder, or a name on the hub",
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
"""The fields of the first screen, and their meaning in a few words."""
_MOST_WIDTH = 120


def show_help(
    program: str, name: str, description: str, config: "RunConfig", *, every_field: bool
) -> None:
    """Print the help of a config.

    Args:
        program: how the user calls it. Example: "run_train.sh"
        name: the config's name.
        description: the config function's docstring.
        config: its values are shown.
        every_field: whether all fields are shown, and not the screen.
    """
    command = f"{program} --config {name}"
    if not every_field:
        print("\n".join(_screen(command, description, config)))
        return
    about = f"Fields of {name}, with their values and meaning."
    tyro.cli(
        type(config), default=config, args=["--help"], prog=command, description=about, config=TYRO
    )


TYRO = (tyro.conf.AvoidSubcommands,)
"""How tyro reads and describes a config."""


def _screen(command: str, description: str, config: "RunConfig") -> list[str]:
    """The lines of `--help`."""
    width = min(shutil.get_terminal_size().columns, _MOST_WIDTH)
    about = textwrap.wrap(" ".join(description.partition("\n\n")[0].split()), width)
    given = {
        f"--{_option(path)} {_value(config, path)}": meaning
        for path, meaning in MOST_CHANGED.items()
    }
    changed = [f"  {_cut(option, 34):34}  {meaning}" for option, meaning in given.items()]
    groups = {
        _option(group): _meaning(config, group).partition(". ")[0].removesuffix(".")
        for group in _groups(config)
    }
    group_width = max(map(len, groups))
    named = [f"  {group:{group_width}}  {meaning}" for group, meaning in groups.items()]
    lines = [
        f"usage: {command} [--FIELD VALUE ...]",
        *about,
        "",
        "Fields that most people change, with this config's values:",
        *changed,
        "",
        "All groups. --help all shows their fields:",
        *named,
        "--config NAME or FILE.py:FUNCTION: another config; --list-configs: the names.",
        "--dry-run: what a run would do; --preview: what the start answers; --print-config: the whole config.",
    ]
    return [_cut(line, width) for line in lines]


def _groups(config: "RunConfig") -> list[str]:
    """The fields of a config that are configs themselves."""
    names = [field.name for field in dataclasses.fields(config)]
    return sorted(
        n for n in names if n != "model_spec" and dataclasses.is_dataclass(getattr(config, n))
    )


def _option(path: str) -> str:
    return path.replace("_", "-")


def _value(config: "RunConfig", path: str) -> str:
    value = attrgetter(path)(config)
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _meaning(config: "RunConfig", name: str) -> str:
    """The docstring below a field, without its line breaks; "" if it has none."""
    documented = (
        docstrings(cls).get(name, "")
        for cls in type(config).__mro__
        if dataclasses.is_dataclass(cls)
    )
    return next(filter(None, documented), "")


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, by field, each on one line."""
    [body] = (node.body for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."
