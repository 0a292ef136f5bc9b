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
    found = _load(reference, field, "class")
    is_one = isinstance(found, type) and issubclass(found, base)
    expect(
        is_one,
        field,
        reference,
        f"a subclass of {base.__module__}.{base.__qualname__}",
        f"It is {found!r:.80}.",
    )
    return found


def _load(reference: str, field: str, kind: Literal["function", "class"]) -> Any:
    place, _, name = reference.rpartition(":")
    forms = f"path/to/file.py:{kind} or package.module:{kind}"
    is_file = place.endswith(".py")
    place = from_caller(place) if is_file else place
    whole = bool(place and name) and (is_file or re.fullmatch(r"\w+(\.\w+)*", place) is not None)
    expect(
        is_file or not Path(from_caller(place)).is_file(),
        field,
        reference,
        forms,
        f"{place} is no Python file.",
    )
    expect(whole, field, reference, forms, f"Name the {kind} after a colon.")
    expect(
        not is_file or Path(place).is_file(),
        field,
        reference,
        "a file that exists",
        f"There is no file {place}.",
    )
    module = import_checked(Path(place).resolve() if is_file else place, field)
    function = getattr(module, name, None)
    is_kind = inspect.isfunction if kind == "function" else inspect.isclass
    own = [n for n, f in inspect.getmembers(module, is_kind) if f.__module__ == module.__name__]
    # A package imports what it has from its modules.
    known = own or [
        n for n in dir(module) if n[0] != "_" and f"{module.__name__}.{n}" not in sys.modules
    ]
    remedy = f"{did_you_mean(name, known)}It has {known}."
    if function is not None and not inspect.ismodule(function):
        remedy = f"{name} is of the type {type(function).__name__}: write a {kind}."
    expect(callable(function), field, reference, f"a {kind} of {place}", remedy)
    return function


def load_reward(reference: str) -> tuple[str, Callable[..., Any]]:
    """A reward function and the name it goes by: the one behind the colon, or one given in front.

    place:function, place:factory(keyword=value, ...), or name=either of them, with literal values.

    Raises:
        UserError: naming `grader.rewards`.
    """
    field_name = "grader.rewards"
    found = _REWARD.fullmatch(reference)
    before, equals, _ = reference.partition("=")
    named = (
        not equals
        or before.isidentifier()
        or not before.replace("-", "").replace(" ", "").isidentifier()
    )
    expect(
        named,
        field_name,
        reference,
        "a name of letters, digits and _ before the =",
        "Rename it, without spaces.",
    )
    if found is None:
        return reference, load_function(reference, field_name)  # which says what is wrong with it
    name, function = found["name"] or found["function"], load_function(found["place"], field_name)
    if found["arguments"] is None:
        expect(
            not inspect.isclass(function),
            field_name,
            reference,
            "a function or an object, not a class",
            "Add ().",
        )
        return name, _checked(function, reference)
    is_one = (
        inspect.isfunction(function) and "completions" in inspect.signature(function).parameters
    )
    remedy = f"{found['function']} is one itself: leave out the parentheses."
    expect(not is_one, field_name, reference, "a call that returns a reward function", remedy)
    try:
        call = ast.parse(f"f({found['arguments']})", mode="eval").body
        keywords = {word.arg: _literal(word.value) for word in call.keywords}
        made = function(*map(_literal, call.args), **keywords)
    except Exception as error:
        raise UserError(
            f"{field_name} = {reference!r}: expected a call with literal values that {found['function']} takes, but: {error}. "
            "Correct the arguments."
        ) from error
    return name, _checked(made, reference)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)} is none; a text needs quotes") from error


def _checked(function: Any, reference: str) -> Callable[..., Any]:
    """Returns a reward function. Raises UserError if it cannot be called, or has no parameters that Python can read."""
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"grader.rewards = {reference!r}: expected a Python function, or a call that returns one, but: {error}. Wrap it in a "
            "function of your own."
        ) from error
    return function


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
    frames = [
        frame
        for e in (error, error.__cause__)
        if e
        for frame in traceback.extract_tb(e.__traceback__)
    ]
    return [frame for frame in frames if is_users_file(frame.filename)]


def is_users_class(cls: type) -> bool:
    """Whether a class is the user's: of a user's file, or of no file, as in a notebook."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is None or is_users_file(file)


def is_users_file(file: str) -> bool:
    """Whether a Python file is the user's: neither this package's nor installed in the environment."""
    prefixes = (_PACKAGE, sys.prefix, sys.base_prefix)
    resolved = str(Path(file).resolve())
    return not file.startswith((*prefixes, "<")) and not resolved.startswith(
        tuple(map(os.path.realpath, prefixes))
    )


def module_name(module: str) -> str:
    """Returns the name under which a user's file would be imported, for the name that a module has here.

    Example: module_name("torchtitan_rl_file_0a1b2c3d4e5f") == "my_losses"
    """
    loaded = sys.modules.get(module)
    return Path(loaded.__file__).stem if module.startswith(_FILE) and loaded else module


def caller_folder() -> str:
    """Returns the folder in which the user ran the command."""
    return os.environ.get(CALLER_FOLDER, os.getcwd())


def from_caller(path: str) -> str:
    """Resolves a relative path against the folder the user called from, or else against the checkout. Raises UserError if too long."""
    longest = max(map(len, os.fsencode(path).split(b"/")))
    expect(
        longest < 256 and len(path) < 4096,
        "path",
        path,
        "names of at most 255 bytes, 4095 in all",
        "Shorten it.",
    )
    caller, path = (
        caller_folder(),
        os.path.expanduser(path),
    )  # the shell does not expand ~ in --option=~/x
    there = Path(caller, path)
    here = Path(caller).resolve() == Path.cwd() or (
        os.path.exists(path) and not os.path.exists(there)
    )
    return path if here else str(there)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known names closest to `name`, or "" if none is close."""
    known = {one.lower(): one for one in reversed([*known])}
    close = [known[one] for one in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)]
    return f"Did you mean {' or '.join(close)}? " if close else ""


def _key(path: Path) -> str:
    """The name of a file's module in sys.modules."""
    return _FILE + hashlib.sha256(str(path).encode()).hexdigest()[:12]


def _load_file(path: Path) -> ModuleType:
    """Imports a file as a module, once, so that all functions taken from it share their state."""
    key = _key(path)
    if key not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(
                str(path.parent)
            )  # modules in the same folder can be imported, as with a script
        spec = importlib.util.spec_from_file_location(key, path)
        sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
