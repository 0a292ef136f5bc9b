"""A function by its reference, for configs and reward functions alike: path/to/file.py:function or package.module:function."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan_rl.core.errors import UserError, expect

CALLER_FOLDER = "TORCHTITAN_RL_CALLER_FOLDER"
"""The environment variable by which run_train.sh, which goes over to the checkout, tells where it was called."""

_REWARD = re.compile(r"(?:(?P<name>\w+)=)?(?P<place>[^:]+:(?P<function>\w+))(?:\((?P<arguments>.*)\))?", re.DOTALL)


def load_function(reference: str, field: str) -> Callable[..., Any]:
    """What `reference` stands for. Raises UserError, naming `field`, where there is no such file, module or function."""
    place, _, name = reference.rpartition(":")
    forms = "path/to/file.py:function or package.module:function"
    is_file = place.endswith(".py")
    place = from_caller(place) if is_file else place
    whole = bool(place and name) and (is_file or not place.startswith("."))
    expect(whole, field, reference, forms, "Name the function behind a colon.")
    expect(not is_file or Path(place).is_file(), field, reference, "a file that exists", f"There is no file {place}.")
    module = import_checked(Path(place).resolve() if is_file else place, field)
    function = getattr(module, name, None)
    known = [n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    remedy = f"{did_you_mean(name, known)}It has {known}."
    expect(callable(function), field, reference, f"a function of {place}", remedy)
    return function


def load_reward(reference: str) -> tuple[str, Callable[..., Any]]:
    """A reward function and the name it goes by: the one behind the colon, or one given in front.

    place:function, place:factory(keyword=value, ...), or name=either of them, with literal values.

    Raises:
        UserError: naming `grader.rewards`.
    """
    field_name = "grader.rewards"
    found = _REWARD.fullmatch(reference)
    if found is None:
        return reference, load_function(reference, field_name)  # which says what is wrong with it
    name, function = found["name"] or found["function"], load_function(found["place"], field_name)
    if found["arguments"] is None:
        expect(not inspect.isclass(function), field_name, reference, "a function or an object, not a class", "Add ().")
        return name, function
    try:
        call = ast.parse(f"f({found['arguments']})", mode="eval").body
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        return name, function(*map(ast.literal_eval, call.args), **keywords)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UserError(
            f"{field_name} = {reference!r}: expected a call with literal values that {found['function']} takes, but: {error}. "
            "Correct the arguments."
        ) from error


def import_checked(place: Path | str, field: str) -> ModuleType:
    """A file, or a module by its name. Raises UserError, naming `field`, where it is no Python or what it imports is missing."""
    try:
        return _load_file(place) if isinstance(place, Path) else importlib.import_module(place)
    except (ImportError, SyntaxError) as error:  # any other keeps its traceback, which ends in the user's own line
        raise UserError(
            f"{field} = {str(place)!r}: expected Python that can be imported, but: {error}. Correct it."
        ) from error


def caller_folder() -> str:
    """Where the user called from."""
    return os.environ.get(CALLER_FOLDER, os.getcwd())


def from_caller(path: str) -> str:
    """A path as the user meant it, who may have called run_train.sh from another folder; one of the checkout's where there is none."""
    caller, path = caller_folder(), os.path.expanduser(path)  # --option=~/x is left to us
    there = Path(caller, path)
    here = Path(caller).resolve() == Path.cwd() or (os.path.exists(path) and not os.path.exists(there))
    return path if here else str(there)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names closest to `name`; "" where none is close."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(close)}? " if close else ""


def _load_file(path: Path) -> ModuleType:
    """The file as a module: one for each file however many functions are taken from it, so that they share what they keep."""
    key = f"torchtitan_rl_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # what lies beside it can be imported, as beside a script
        spec = importlib.util.spec_from_file_location(key, path)
        sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
