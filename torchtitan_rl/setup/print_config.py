"""Prints a config as a Python file that returns an equal one, to be read, edited and run again."""

import dataclasses
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from torchtitan_rl.library.named_models import NamedModel
from torchtitan_rl.library.references import module_name

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

_WIDTH = 100


def as_python(name: str, config: "RunConfig") -> str:
    """Python code with a function that returns `config`. ./run_train.sh --config FILE.py:FUNCTION runs it.

    It contains only what differs from the defaults. The model is taken from the registered config.

    Args:
        name: the registered config that `config` is based on. The function gets its name.
    """
    source = _Source(name)
    body = textwrap.indent(f"return {source.expression(config)}", "    ")
    function = name.rpartition(":")[2]
    imports = "\n".join(sorted(f"from {module} import {imported}" for module, imported in source.imports))
    return f'"""{name}, resolved."""\n\n{imports}\n\n\ndef {function}() -> RunConfig:\n{body}\n'


class _Source:
    """Writes expressions and collects the imports that they need."""

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self.imports: set[tuple[str, str]] = set()

    def expression(self, value: Any) -> str:
        """A Python expression for `value`."""
        if isinstance(value, NamedModel):
            self.imports.add((NamedModel.__module__, value.function))
            return _call(value.function, [f"{k}={self.expression(v)}" for k, v in value.arguments.items()], "()")
        if hasattr(value, "state_dict_adapter"):  # a ModelSpec, which holds functions
            self.imports.add(("torchtitan_rl.setup.registry", "load_config"))
            return f"load_config({self._config_name!r}).model_spec"
        if dataclasses.is_dataclass(value):
            return _call(self._named(type(value)), [f"{k}={self.expression(v)}" for k, v in _changed(value)], "()")
        if isinstance(value, dict):
            return _call("", [f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()], "{}")
        if isinstance(value, list):
            return _call("", [self.expression(item) for item in value], "[]")
        if isinstance(value, tuple):
            return _call("tuple", [_call("", [self.expression(item) for item in value], "[]")], "()")
        return self._named(value) if inspect.isfunction(value) or inspect.isclass(value) else repr(value)

    def _named(self, thing: Any) -> str:
        """The name of a class or function. Its outermost class is imported."""
        self.imports.add((module_name(thing.__module__), thing.__qualname__.partition(".")[0]))
        return thing.__qualname__


def _changed(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that differ from their default, with their values."""

    def default(field: dataclasses.Field) -> Any:
        made = field.default_factory is not dataclasses.MISSING
        return field.default_factory() if made else field.default

    fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    return [(field.name, found) for field, found in fields if not _equal(found, default(field))]


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _call(name: str, parts: list[str], brackets: str) -> str:
    """`name` and the parts in brackets, on one line if they fit."""
    line = f"{name}{brackets[0]}{', '.join(parts)}{brackets[1]}"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    inside = "".join(f"{textwrap.indent(part, '    ')},\n" for part in parts)
    return f"{name}{brackets[0]}\n{inside}{brackets[1]}"
