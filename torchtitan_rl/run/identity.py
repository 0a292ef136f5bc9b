"""Says which code a run has: the classes of its config's parts, and the git repositories with their uncommitted changes."""

import ast
import hashlib
import inspect
import subprocess
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.fields.references import is_users_class, module_name

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

DIGITS = 12
"""Hex digits of a digest."""
CLASS = "class"
"""The key of a part's class in config.json. No field of a Python class can have this name."""


def built_by(config: Any) -> type:
    """Returns the class that a config is nested in and builds, or the config's own class."""
    owner = getattr(type(config), "_owner", None)
    return owner if owner and type(config).__qualname__.endswith(".Config") else type(config)


def reference(cls: type) -> str:
    """Example: "my_losses:Asymmetric", "torchtitan_rl.algorithm.losses.clip:Clip"."""
    return f"{module_name(cls.__module__)}:{cls.__qualname__.removesuffix('.Config')}"


def identity(config: Any) -> str:
    """The name by which a resumed run's part is compared: a user's class with the digest of its source, else the class's name.

    Comments and the rest of its file do not count.

    Example: "Clip", "my_losses:Asymmetric 3fa91c02b7de"
    """
    own = built_by(config)
    sources = "".join(_users_source(cls) for cls in own.__mro__)
    if not sources:
        return type(config).__qualname__.removesuffix("Config").removesuffix(".")
    return f"{reference(own)} {_digest(sources)}"


def source_digest(function: Callable) -> str:
    """A digest of the source of a user's function, or of another callable's class; "" if it is not the user's or has no source."""
    source = _users_source(function if inspect.isfunction(function) else type(function))
    return _digest(source) if source else ""


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:DIGITS]


def described(config: "RunConfig") -> dict[str, Any]:
    """The config as a plain dict, in which every part has its "class" and the model Hugging Face's entries."""
    spec, without_model = config.model_spec, replace(config, model_spec=None)
    described_parts = _with_classes(without_model, without_model.to_dict())
    if spec is not None:
        # torchtitan's own tree repeats each layer, with addresses of functions, which differ between runs.
        from torchtitan_rl.models.hf_config import hf_architecture  # it imports torchtitan's models

        names = {"name": spec.name, "flavor": spec.flavor}
        described_parts["model_spec"] = names | hf_architecture(spec.model)
    return described_parts


def repositories(folders: Iterable[str | Path]) -> tuple[list[dict[str, Any]], str]:
    """The git repositories that folders are in, each once, and the uncommitted changes of their tracked files as text.

    Example: [{"folder": "/home/me/torchtitan_rl", "commit": "9f1c...", "dirty": False}], ""
    """
    states: dict[str, dict[str, Any]] = {}
    diffs = ""
    for folder in folders:
        try:
            top = _git(folder, "rev-parse", "--show-toplevel").strip()
            if top not in states:
                commit, diff = _git(top, "rev-parse", "HEAD").strip(), _git(top, "diff", "HEAD")
                states[top] = {"folder": top, "commit": commit, "dirty": diff != ""}
                diffs += diff
        except (OSError, subprocess.SubprocessError):
            pass  # without git, in no repository, or in one without a commit
    return list(states.values()), diffs


def _git(folder: str | Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    read = {"capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(command, check=True, timeout=20, **read).stdout


@cache
def _users_source(part: type | Callable) -> str:
    """The syntax tree of a user's class or function as text; "" for another one, or if there is no source."""
    if not is_users_class(part):
        return ""
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(part))))
    except (OSError, TypeError, SyntaxError):
        return ""


def _with_classes(value: Any, plain: Any) -> Any:
    """`plain`, which was made from `value`, with the class of each config in it."""
    if is_dataclass(value) and isinstance(plain, dict):
        of_value = {name: getattr(value, name, None) for name in plain}
        return {CLASS: reference(built_by(value)), **_with_classes(of_value, plain)}
    if isinstance(value, dict) and isinstance(plain, dict):
        return {name: _with_classes(value.get(name), entry) for name, entry in plain.items()}
    if isinstance(value, (list, tuple)) and isinstance(plain, (list, tuple)):
        return [_with_classes(part, entry) for part, entry in zip(value, plain, strict=True)]
    return plain
