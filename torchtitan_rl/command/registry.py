"""Parses the command line into a config: `--config NAME` or `--config path/to/file.py:function`, then dotted overrides."""

import argparse
import gc
import inspect
import json
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from torchtitan_rl import events
from torchtitan_rl.command.help_screen import TYRO, show_help
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.references import (
    did_you_mean,
    from_caller,
    import_checked,
    load_function,
    returned,
)
from torchtitan_rl.observe.terminal import Terminal
from torchtitan_rl.run.checkpoint_folder import check_form, is_choice
from torchtitan_rl.run.hub import is_hub_name
from torchtitan_rl.run.identity import described
from torchtitan_rl.run.secrets import without_secrets

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

ConfigFunction = Callable[[], "RunConfig"]

DEFAULT = "debug"
"""The config without --config."""

_SWITCHES = ("--list-configs", "--print-config", "--dry-run", "--preview")
"""Options that are no fields of a config, and end the program after what they show."""


def config_functions() -> dict[str, ConfigFunction]:
    """All public functions defined in modules of configs/, by name.

    Raises UserError if a module cannot be imported, or two functions have one name.
    """
    from torchtitan_rl import configs

    found: dict[str, ConfigFunction] = {}
    for info in pkgutil.iter_modules(configs.__path__):
        if info.ispkg:
            continue
        module = import_checked(f"{configs.__name__}.{info.name}", "configs/")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                first = found.setdefault(name, function)
                both = f"one name for one config, but {first.__module__} and {module.__name__} both have it"
                expect(first is function, "--config", name, both, "Rename one.")
    return found


def config_function(name: str) -> ConfigFunction:
    """The config function of a registered name, or of a reference such as path/to/file.py:function.

    Raises UserError, with similar names, if there is none.
    """
    if _is_reference(name):
        return load_function(name, "--config")
    known = config_functions()
    remedy = f"{did_you_mean(name, known)}--list-configs shows all."
    expect(name in known, "--config", name, "a registered name or path/to/file.py:function", remedy)
    return known[name]


def _is_reference(name: str) -> bool:
    return ":" in name or name.endswith(".py")


def is_config(name: str) -> bool:
    """Whether `name` is a registered config or has the form of a reference to one."""
    return _is_reference(name) or name in config_functions()


def load_config(name: str) -> "RunConfig":
    """The config that `name` stands for. Raises UserError like `config_function`, or if the function returns no RunConfig."""
    from torchtitan_rl.config import RunConfig

    function = config_function(name)
    written = inspect.isfunction(function)
    expect(written, "--config", name, "a function", f"It is {function!r:.200}: write one with def.")
    config = returned(function, "--config", name, "a function that returns a RunConfig", RunConfig)
    check_fields(config)
    return config


def parse_args(args: Sequence[str]) -> "tuple[str, RunConfig]":
    """(config name, config with overrides) from command-line arguments.

    Prints and exits for --help, --list-configs, --print-config, --dry-run and --preview.
    """
    program = os.environ.get("TORCHTITAN_RL_PROGRAM", "run_train.sh")
    own = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    own.add_argument("--config", metavar="NAME or path/to/file.py:function")
    questions = own.add_mutually_exclusive_group()
    questions.add_argument("-h", "--help", nargs="?", const="", choices=["", "all"], metavar="all")
    for flag in _SWITCHES:
        questions.add_argument(flag, f"--{flag[2:].replace('-', '_')}", action="store_true")
    given, overrides = own.parse_known_args(args)
    if given.list_configs:
        list_configs()
        raise SystemExit(0)
    name = given.config or DEFAULT
    default = load_config(name)
    command = f"{program} --config {name}"
    config = tyro.cli(type(default), default=default, prog=command, config=TYRO, args=overrides)
    if given.help is not None:
        description = inspect.getdoc(config_function(name)) or ""
        show_help(command, description, config, every_field=bool(given.help))
        raise SystemExit(0)
    for field in ("dump_folder", "hf_assets_path", "teacher", "resume"):
        path = getattr(config, field)
        if field == "resume" and not (path and Path(from_caller(path)).is_dir()):
            check_form(path)
        if _is_path(field, path):
            setattr(config, field, from_caller(path, field))
    for teacher, path in config.more_teachers.items():
        if _is_path("teacher", path):
            config.more_teachers[teacher] = from_caller(path)
    if not given.config:
        _check_is_default(config.dump_folder)
    if given.preview or given.dry_run:
        _try_out(config, preview=given.preview)
    elif given.print_config:
        shown = without_secrets(described(config))
        print(json.dumps(shown, indent=2, default=repr), flush=True)
    else:
        return name, config
    raise SystemExit(0)


def _check_is_default(folder: str) -> None:
    """Raise UserError if the run in the folder was started with another config than DEFAULT."""
    try:
        stored = json.loads(Path(folder, "config.json").read_text())
        name, options = stored["config"], shlex.join(stored["command"][1:])
    except (OSError, ValueError, KeyError):  # no run, or a damaged file of one
        return
    was = f"{name}, with which {folder} was started"
    expect(name == DEFAULT, "--config", DEFAULT, was, f"Its options were: {options}")


def _try_out(config: "RunConfig", *, preview: bool) -> None:
    from torchtitan_rl.command.first_check import check_at_once

    events.listen(Terminal())
    check_at_once(config)
    with events.phase("import torchtitan and transformers"):
        from torchtitan_rl.command.dry_run import show_run
        from torchtitan_rl.command.preview import show_preview
    gc.enable()  # command.train has disabled it
    if preview:
        show_preview(config)
        return
    try:
        show_run(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except SystemExit as request:  # a task's: not all is shown, so it is no success
        raise RuntimeError(f"something called sys.exit({request.code!r})") from request


def _is_path(field: str, given: str) -> bool:
    """Whether a field's value is a path: not a model on the hub, a recipe, a step, auto or never."""
    if field == "resume":
        return not is_choice(given)
    elsewhere = (
        field != "dump_folder"
        and (":" in given or is_hub_name(given))
        and not Path(from_caller(given)).exists()
    )
    return bool(given) and not elsewhere


def list_configs() -> None:
    """Print the registered configs with a line each, below the first line of their module."""
    for module, functions in groupby(config_functions().items(), lambda item: item[1].__module__):
        print(_first_line(sys.modules[module]))
        for name, function in functions:
            print(f"  {name:17} {_first_line(function)}")
    print("\n--config NAME --help: its fields; --config NAME --dry-run: what a run would do")


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]
