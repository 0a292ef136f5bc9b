"""Says which classes a config's parts are, and which source files are the user's: their digests, and copies in the run folder."""

import ast
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchtitan_rl.fields.field_limits import parts
from torchtitan_rl.fields.references import is_users_file, module_name, module_of_reference
from torchtitan_rl.run.secrets import source_without_secrets

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

SOURCES = "sources"
"""The folder of a run with copies of the user's source files."""
DIGITS = 12
"""Hex digits of a digest."""
CLASS = "class"
"""The key of a part's class in config.json. No field of a Python class can have this name."""


def built_by(config: Any) -> type:
    """Returns the class that a config is nested in and builds, or the config's own class."""
    owner = getattr(type(config), "_owner", None)
    return owner if owner and type(config).__qualname__.endswith(".Config") else type(config)


def reference(cls: type) -> str:
    """Example: "my_losses:Asymmetric", "torchtitan_rl.algorithm.losses.loss:Clip"."""
    return f"{module_name(cls.__module__)}:{cls.__qualname__.removesuffix('.Config')}"


def identity(config: Any) -> str:
    """The name by which a resumed run's part is compared: a user's class with the digest of its source, else the class's name.

    Comments and the rest of its file do not count.

    Example: "Clip", "my_losses:Asymmetric 3fa91c02b7de"
    """
    own = built_by(config)
    theirs = [ast.dump(tree) for cls in own.__mro__ if (tree := _users_source(cls)) is not None]
    if not theirs:
        return type(config).__qualname__.removesuffix("Config").removesuffix(".")
    return f"{reference(own)} {hashlib.sha256(''.join(theirs).encode()).hexdigest()[:DIGITS]}"


def described(config: "RunConfig") -> dict[str, Any]:
    """The config as a plain dict, in which every part has its "class" and the model Hugging Face's entries, with the digests of the
    user's "sources"."""
    spec, without_model = config.model_spec, replace(config, model_spec=None)
    told = _with_classes(without_model, without_model.to_dict())
    if spec is not None:
        # torchtitan's own tree repeats each layer, with addresses of functions, which differ between runs.
        from torchtitan_rl.models import hf_architecture  # it imports torchtitan's models

        told["model_spec"] = {
            "name": spec.name,
            "flavor": spec.flavor,
            **hf_architecture(spec.model),
        }
    return {**told, SOURCES: digests(config)}


def digests(config: "RunConfig") -> dict[str, str]:
    """Digests of the user's source files of a config's parts and reward functions, by name.

    Example: {"my_losses.py": "3fa91c02b7de"}
    """
    return {name: _digest(path) for name, path in _named(source_files(config)).items()}


def keep_sources(
    config: "RunConfig", run_folder: Path, *, config_file: Path | None
) -> dict[str, dict[str, str]]:
    """Copy the user's source files, without secrets, into the run folder. Returns what config.json says of them.

    A copy's name has the file's digest, so those of an earlier start stay.

    Example: {"my_losses.py": {"file": "/home/me/my_losses.py", "sha256": "3fa91c02b7de", "copy": "sources/my_losses-3fa91c02.py"}}
    """
    kept = {}
    for name, path in _named(source_files(config, config_file)).items():
        copy = Path(SOURCES, f"{path.stem}-{_digest(path)[:8]}.py")
        (run_folder / SOURCES).mkdir(exist_ok=True)
        (run_folder / copy).write_text(
            source_without_secrets(_content(path).decode(errors="replace"))
        )
        kept[name] = {"file": str(path), "sha256": _digest(path), "copy": str(copy)}
    return kept


def source_files(config: "RunConfig", config_file: Path | None = None) -> list[Path]:
    """The user's files in which parts, reward functions, demonstrations and the config are defined, and imported ones beside them, sorted."""
    modules = {
        sys.modules.get(cls.__module__) for part in _parts(config) for cls in built_by(part).__mro__
    }
    references = [
        *config.grader.rewards,
        *config.metrics.sinks,
        config.prompts.demonstrate,
        getattr(config.task, "warm_start", ""),
    ]
    modules |= {module_of_reference(reference) for reference in references}
    modules |= {
        module
        for module in list(sys.modules.values())
        if config_file and _file(module) == config_file
    }
    found = {file for module in modules if (file := _file(module))}
    folders = {os.path.dirname(module.__file__) for module in modules if _file(module)}
    beside = (
        m
        for m in list(sys.modules.values())
        if os.path.dirname(str(getattr(m, "__file__", ""))) in folders
    )
    return sorted(found | {file for module in beside if (file := _file(module))})


def _file(module: ModuleType | None) -> Path | None:
    """A module's file if it is the user's; None otherwise."""
    file = getattr(module, "__file__", None)
    return (
        Path(file).resolve()
        if isinstance(file, str) and file.endswith(".py") and is_users_file(file)
        else None
    )


def _named(files: list[Path]) -> dict[str, Path]:
    """Files by their name, or with their folder's name where two have one name."""
    names = [file.name for file in files]
    return {
        file.name if names.count(file.name) == 1 else "/".join(file.parts[-2:]): file
        for file in files
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(_content(path)).hexdigest()[:DIGITS]


def _content(path: Path) -> bytes:
    """Empty if the file was removed after it was imported."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@cache
def _users_source(cls: type) -> ast.Module | None:
    """The syntax tree of a user's class; None for another one, or if there is no source."""
    if _file(sys.modules.get(cls.__module__)) is None:
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None


def _parts(config: Any) -> Iterator[Any]:
    """A config and all configs in it."""
    yield config
    for field in fields(config):
        for _, part in parts(getattr(config, field.name)):
            if is_dataclass(part) and not isinstance(part, type) and field.name != "model_spec":
                yield from _parts(part)


def _with_classes(value: Any, plain: Any) -> Any:
    """`plain`, which was made from `value`, with the class of each config in it."""
    if is_dataclass(value) and isinstance(plain, dict):
        named = {
            name: _with_classes(getattr(value, name, None), entry) for name, entry in plain.items()
        }
        return {CLASS: reference(built_by(value)), **named}
    if isinstance(value, dict) and isinstance(plain, dict):
        return {name: _with_classes(value.get(name), entry) for name, entry in plain.items()}
    if isinstance(value, (list, tuple)) and isinstance(plain, (list, tuple)):
        return [_with_classes(part, entry) for part, entry in zip(value, plain, strict=True)]
    return plain
