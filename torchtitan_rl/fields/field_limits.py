"""The check of all fields of a config: their types, by pydantic, and the limits of a `number`.

pydantic's TypeAdapter accepts an instance of a dataclass as it is, and makes another class of it when told to look inside. Configs are
therefore walked here, and pydantic judges one field at a time. The launcher imports this file, so it imports no torch.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import core_schema

from torchtitan_rl.errors import expect

_COMPARISONS = {
    "above": ("more than", operator.gt),
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def check_fields(config: Any, path: str = "") -> None:
    """Check the type of every field of a config and of its nested configs, and the limits of every `number`.

    Python does not check what a config function assigns, such as None, a class or a text in the place of a config.

    Raises UserError, naming the field by its full `path`.
    """
    for declared in fields(config):
        name = f"{path}.{declared.name}".lstrip(".")
        value = getattr(config, declared.name, MISSING)
        expect(value is not MISSING, name, "deleted", "a field of the config", "Set it.")
        if expected := expected_type(value, declared.type):
            shown = type(value) if is_dataclass(value) and not isinstance(value, type) else value
            expect(False, name, shown, expected, _remedy(declared))
        for key, part in parts(value):
            if is_dataclass(part) and not isinstance(part, type):
                check_fields(part, f"{name}.{key}".rstrip("."))
        if "limits" in declared.metadata:
            check_number(declared, value, name, config)


def expected_type(value: Any, declared: Any) -> str:
    """Returns what the declared type expects in words, such as "a valid integer"; "" if the value is of that type.

    Any value is of a type that is only named (a forward reference).
    """
    if get_origin(declared) is Annotated:
        declared = get_args(declared)[0]
    try:
        _adapter(declared).validate_python(value)
    except ValidationError as error:
        expected: list[str] = []
        for fault in error.errors(include_url=False):
            _, should_be, words = fault["msg"].partition("Input should be ")
            if not should_be:  # such as "Field required", for a tuple that is too short
                return str(declared).replace("collections.abc.", "").replace("typing.", "")
            expected.append(words)
        return " or ".join(dict.fromkeys(expected))
    return ""


@cache
def _adapter(declared: Any) -> TypeAdapter:
    config = ConfigDict(arbitrary_types_allowed=True, strict=True)
    try:
        return TypeAdapter(_with_instances(declared), config=config)
    except (PydanticUndefinedAnnotation, PydanticUserError):
        return TypeAdapter(Any)


def _with_instances(declared: Any) -> Any:
    """The type for pydantic: a dataclass in it stands for its instances, also those of subclasses."""
    if isinstance(declared, str):
        return Any
    if is_dataclass(declared):
        instances = core_schema.is_instance_schema(declared)
        return Annotated[Any, GetPydanticSchema(lambda source, handler: instances)]
    origin, inner = get_origin(declared), tuple(map(_with_instances, get_args(declared)))
    if origin in (Union, UnionType):
        return Union[inner]  # noqa: UP007, the types are known only here
    return origin[inner] if origin in (list, dict, tuple) else declared


def check_number(declared: Field, value: Any, name: str, config: Any = None) -> None:
    """Raise UserError, with the field called `name`, unless `value` is within the declared limits of a `number`.

    Infinity is only allowed where it is declared. `config` has the fields that the limits name.
    """
    bounds: dict[str, float] = {}
    words: list[str] = []
    for how, limit in declared.metadata["limits"].items():
        bounds[how] = getattr(config, limit) if isinstance(limit, str) else limit
        whose = f" ({limit})" if isinstance(limit, str) else ""
        if math.isfinite(bounds[how]):
            words.append(f"{_COMPARISONS[how][0]} {bounds[how]}{whose}")
    expected, remedy = " and ".join(words) or "a finite number", _remedy(declared)
    for _, element in parts(value):
        if element is not None and not isinstance(element, str):  # such as "auto"
            within = all(_COMPARISONS[how][1](element, bound) for how, bound in bounds.items())
            expect(within, name, value, expected, remedy)
            finite = math.isfinite(element) or math.inf in bounds.values()
            expect(finite, name, value, "a finite number", remedy)


def _remedy(declared: Field) -> str:
    """The field's own remedy, or its default."""
    if remedy := declared.metadata.get("remedy"):
        return remedy
    if declared.default not in (MISSING, None):
        return f"Use {declared.default!r}."
    made = getattr(declared.default_factory, "__qualname__", "")
    return f"Use {made}()." if made[:1].isupper() else "Correct the value."


def parts(value: Any) -> Iterable[tuple[str, Any]]:
    """(key, value) for each item of a dict, ("", value) for each item of a list or tuple, ("", value) for any other value."""
    if isinstance(value, dict):
        return value.items()
    items = value if isinstance(value, (list, tuple)) else [value]
    return [("", item) for item in items]
