"""From a command line to a checked config: `--config NAME` or `--config path/to/file.py:function`, then dotted overrides."""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.run.errors import UserError

if TYPE_CHECKING:
    from torchtitan_rl.controller import Controller

ConfigFunction = Callable[[], "Controller.Config"]
CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def config_functions() -> dict[str, ConfigFunction]:
    """Every public function defined in a module of configs/, by name."""
    import configs

    found: dict[str, ConfigFunction] = {}
    for info in pkgutil.iter_modules(configs.__path__):
        module = importlib.import_module(f"configs.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = function
    return found


def load_config(name: str) -> "Controller.Config":
    """The config that a registered name, or path/to/file.py:function, stands for.

    Raises:
        UserError: with the closest names, when there is none.
    """
    if ":" in name or name.endswith(".py"):
        return _from_file(name)
    known = config_functions()
    if name not in known:
        raise UserError(f"--config: no config named {name!r}{_suggest(name, known)}. --list-configs shows all.")
    return known[name]()


def _from_file(reference: str) -> "Controller.Config":
    path, _, function = reference.partition(":")
    if not function or not Path(path).is_file():
        problem = "no function is named" if Path(path).is_file() else f"there is no file {path}"
        raise UserError(f"--config: {reference!r}: {problem}; expected path/to/file.py:function.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    known = {n: f for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
    if function not in known:
        raise UserError(f"--config: {path} defines no function {function!r}{_suggest(function, known)}.")
    return known[function]()


def _suggest(name: str, known: dict[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def parse_args(args: Sequence[str]) -> "tuple[str, Controller.Config]":
    """(config name, config with overrides) from command-line arguments; prints and exits for --help and --list-configs."""
    args = list(args)
    if "--list-configs" in args:
        list_configs()
        raise SystemExit(0)
    name = "debug"
    for i, arg in enumerate(args):
        if arg == "--config" or arg.startswith("--config="):
            if arg == "--config" and i + 1 == len(args):
                raise UserError(
                    "--config: no value given; expected a name of --list-configs or path/to/file.py:function."
                )
            name = args[i + 1] if arg == "--config" else arg.partition("=")[2]
            del args[i : i + (2 if arg == "--config" else 1)]
            break
    default = load_config(name)
    config = tyro.cli(
        type(default),
        default=default,
        args=args,
        prog=f"run_train.sh --config {name}",
        description=f"Train {name}: {inspect.getdoc(config_functions().get(name)) or ''}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    return name, config


def list_configs() -> None:
    """Print the registered configs: model, task, parallelism, and what each is and needs."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for name, function in config_functions().items():
        config = function()
        spec: ModelSpec = config.model_spec
        p = config.trainer.parallelism
        fsdp = "all ranks" if p.data_parallel_shard_degree < 0 else p.data_parallel_shard_degree
        task = type(config.task).__qualname__.partition(".")[0]
        layout = f"FSDP {fsdp}, TP {p.tensor_parallel_degree}, generator TP {config.generator.tensor_parallel_degree}"
        summary = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        console.print(f"[bold]{name:18}[/bold] {spec.name} {spec.flavor}, {task}, {layout}", soft_wrap=True)
        console.print(f"  [dim]{escape(summary)}[/dim]", soft_wrap=True)
