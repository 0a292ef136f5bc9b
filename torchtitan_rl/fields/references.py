"""Loads functions by reference: path/to/file.py:function or package.module:function."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.events import heartbeat

CALLER_FOLDER = "TORCHTITAN_RL_CALLER_FOLDER"
"""Environment variable in which run_train.sh stores the folder it was called from, before it changes to the
checkout."""

_FILE = "torchtitan_rl_file_"
"""The begin of the names of modules that were loaded by their file."""

_PACKAGE = str(Path(__file__).resolve().parents[1])

_REWARD = re.compile(
    r"(?:(?P<name>\w+)=)?(?P<place>[^:]+:(?P<function>\w+))(?:\((?P<arguments>.*)\))?", re.DOTALL
)


def load_function(reference: str, field: str) -> Callable[..., Any]:
    """Returns the function. Raises UserError, naming `field`, if the file, module or function does not exist."""
    return _load(reference, field, "function")


def load_class(reference: str, field: str, base: type) -> type:
    """Returns the class. Raises UserError, naming `field`, if there is none or it is no subclass of `base`."""
    loaded = _load(reference, field, "class")
    is_subclass = isinstance(loaded, type) and issubclass(loaded, base)
    expected = f"a subclass of {base.__module__}.{base.__qualname__}"
    expect(is_subclass, field, reference, expected, f"It is {loaded!r:.80}.")
    return loaded


def _load(reference: str, field: str, kind: Literal["function", "class"]) -> Any:
    place, _, name = reference.rpartition(":")
    is_file, forms = place.endswith(".py"), f"path/to/file.py:{kind} or package.module:{kind}"
    is_module = re.fullmatch(r"\w+(\.\w+)*", place) is not None
    remedy = f"Name the {kind} after a colon."
    expect((is_file or is_module) and name != "", field, reference, forms, remedy)
    if is_file:
        path = Path(from_caller(place))
        expect(path.is_file(), field, reference, "a file that exists", f"There is no file {path}.")
        module = import_checked(path.resolve(), field)
    else:
        module = import_checked(place, field)
    loaded = getattr(module, name, None)
    is_kind = inspect.isfunction if kind == "function" else inspect.isclass
    known = [n for n, f in inspect.getmembers(module, is_kind) if n[0] != "_"]
    remedy = f"{did_you_mean(name, known)}It has {known}."
    if loaded is not None:
        remedy = f"{name} is of the type {type(loaded).__name__}: write a {kind}."
    expect(callable(loaded), field, reference, f"a {kind} of {place}", remedy)
    return loaded


def load_reward(reference: str) -> tuple[str, Callable[..., Any]]:
    """A reward function and the name it goes by: the one behind the colon, or one given in front.

    place:function, place:factory(keyword=value, ...), or name=either of them, with literal values.

    Raises UserError, naming `grader.rewards`.
    """
    field, match = "grader.rewards", _REWARD.fullmatch(reference)
    if match is None:
        return reference, load_function(reference, field)  # which says what is wrong with it
    name, function = match["name"] or match["function"], load_function(match["place"], field)
    if match["arguments"] is None:
        is_class = inspect.isclass(function)
        expected = "a function or an object, not a class"
        expect(not is_class, field, reference, expected, "Add ().")
    else:
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else ()
        is_reward = "completions" in parameters
        remedy = f"{match['function']} is one itself: leave out the parentheses."
        expected = "a call that returns a reward function"
        expect(not is_reward, field, reference, expected, remedy)
        message = f"{field} = {reference!r}: expected a call with literal values that {match['function']} takes, but:"
        with correctable(message):
            call = ast.parse(f"f({match['arguments']})", mode="eval").body
            keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            function = function(*map(ast.literal_eval, call.args), **keywords)
    with correctable(f"{field} = {reference!r}: expected a function that Python can inspect, but:"):
        inspect.signature(function)
    return name, function


def import_checked(place: Path | str, field: str) -> ModuleType:
    """Imports a file or a module. Raises UserError, naming `field`, if that fails or calls sys.exit."""
    # The heartbeat names the file if it ends the process.
    with (
        correctable(f"{field} = {str(place)!r}: expected Python that can be imported, but:"),
        heartbeat(f"import of {place}"),
    ):
        return _load_file(place) if isinstance(place, Path) else importlib.import_module(place)


def returned(function: Callable[[], Any], field: str, value: str, expected: str, kind: type) -> Any:
    """Calls a user's function without arguments. Raises UserError if it raises, exits or does not return a `kind`."""
    with correctable(f"{field} = {value!r}: expected {expected}, but it raises"):
        made = function()
    if inspect.iscoroutine(made):
        made.close()  # otherwise Python warns about it
    if not isinstance(made, kind):  # a config that lacks a field has no repr
        call = " Call it: add ()." if inspect.isfunction(made) else ""
        expect(False, field, value, expected, f"It returned {made!r:.200}.{call}")
    return made


def tried(part: Any, method: str, *args: Any, **options: Any) -> Any:
    """Returns what a method of a task, or of its config, returns. Raises UserError if it raises and is the user's."""
    numbers = "".join(f"({value})" for value in args if isinstance(value, int))
    message = f"{type(part).__qualname__}.{method}{numbers}: expected a method that returns, but it raises"
    with correctable(message) if is_users_class(type(part)) else nullcontext():
        return getattr(part, method)(*args, **options)


@contextmanager
def correctable(message: str) -> Iterator[None]:
    """Replace an error of a user's code by a UserError: the message, the error and the last line of the user's own code.

    A call of sys.exit counts as an error: it would look like the end of the run.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{message} {explained(error)}. Correct it.") from error


def explained(error: BaseException) -> str:
    """Returns an exception's kind and text, and the last line of the user's own code.

    Example: "AttributeError: 'SamplingConfig' object has no attribute 'm' (my_configs.py, line 7)"
    """
    if isinstance(error, (ImportError, SyntaxError)):
        return str(error)
    if isinstance(error, SystemExit):
        return f"SystemExit, as it calls sys.exit({error.code!r:.80}){users_line(error)}"
    return f"{type(error).__name__}: {error}{users_line(error)}"


def users_line(error: BaseException) -> str:
    """Returns the last line of the user's own code in the traceback, " (my_configs.py, line 7)", or ""."""
    own = users_frames(error)
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the traceback in the user's code, such as a config, a task or a reward function."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if error.__cause__:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    return [frame for frame in frames if is_users_file(frame.filename)]


def is_users_class(part: type | Callable) -> bool:
    """Whether a class or function is the user's: of a user's file, or of no file, as in a notebook."""
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    return file is None or is_users_file(file)


def is_users_file(file: str) -> bool:
    """Whether a Python file is the user's: neither this package's nor installed in the environment."""
    folders = (_PACKAGE, sys.prefix, sys.base_prefix)
    if file.startswith("<") or any(map(Path(file).is_relative_to, folders)):
        return False
    real = Path(os.path.realpath(file))
    return not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)


def module_name(module: str) -> str:
    """Returns the name under which a user's file would be imported, for the name that a module has here.

    Example: module_name("torchtitan_rl_file_0a1b2c3d4e5f") == "my_losses"
    """
    loaded = sys.modules.get(module)
    return Path(loaded.__file__).stem if module.startswith(_FILE) and loaded else module


def caller_folder() -> str:
    """Returns the folder in which the user ran the command."""
    return os.environ.get(CALLER_FOLDER, os.getcwd())


def from_caller(path: str, field: str = "path") -> str:
    """Resolves a relative path against the folder the user called from, or else against the checkout. Raises UserError if too long."""
    longest = max(map(len, os.fsencode(path).split(b"/")))
    fits = longest < 256 and len(path) < 4096
    expect(fits, field, path, "names of at most 255 bytes", "Shorten it.")
    caller = caller_folder()
    path = os.path.expanduser(path)  # the shell does not expand ~ in --option=~/x
    there = Path(caller, path)
    in_caller = Path(caller).resolve() == Path.cwd()
    here = in_caller or (os.path.exists(path) and not os.path.exists(there))
    return path if here else str(there)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known names closest to `name`, or "" if none is close."""
    by_lower = {text.lower(): text for text in reversed([*known])}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)
    close = [by_lower[match] for match in matches]
    return f"Did you mean {' or '.join(close)}? " if close else ""


def _load_file(path: Path) -> ModuleType:
    """Imports a file as a module, once, so that all functions taken from it share their state."""
    key = _FILE + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    if key not in sys.modules:
        if str(path.parent) not in sys.path:  # as with a script
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(key, path)
        sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
