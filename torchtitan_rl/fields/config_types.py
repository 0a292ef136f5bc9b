"""Checks that every field of a config has a value of its declared type."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.field_limits import parts


def check_types(config: Any, path: str = "") -> None:
    """Check that every field of a config and of its nested configs has a value of its declared type.

    Python does not check what a config function assigns, such as None, a class or a text in the place of a config.

    Raises:
        UserError: names the field by its full `path`.
    """
    for declared in fields(config):
        name = f"{path}.{declared.name}".lstrip(".")
        try:
            value = getattr(config, declared.name)
            object.__setattr__(config, declared.name, value)
        except AttributeError as error:  # a deleted field, or one that was assigned to the class
            raise UserError(
                f"{name}: expected a field of the returned config, but: {error}. Set fields of the config object, not of its class, and delete none."
            ) from error
        seen = type(value) if is_dataclass(value) and not isinstance(value, type) else value
        expect(
            is_typed(value, declared.type),
            name,
            seen,
            in_words(declared.type),
            _type_remedy(declared, value),
        )
        for key, part in parts(value):
            if is_dataclass(part) and not isinstance(part, type):
                check_types(part, f"{name}.{key}".rstrip("."))


def is_typed(value: Any, declared: Any) -> bool:
    """Whether a value is of the declared type. Any value is of Any, and of a type that is only named (a forward reference).

    A text is no sequence of texts.
    """
    declared = get_args(declared)[0] if get_origin(declared) is Annotated else declared
    if declared is Any or isinstance(declared, str):
        return True
    if get_origin(declared) in (Union, UnionType):
        return any(is_typed(value, one) for one in get_args(declared))
    if (
        isinstance(value, str) and get_origin(declared) is Sequence
    ):  # each of its characters would be an item
        return False
    try:
        check_type(value, declared, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError:
        return False
    return True


def in_words(declared: Any) -> str:
    """Example: "a whole number or None" for int | None, "SamplingConfig" for that class."""
    if get_origin(declared) in (Union, UnionType):
        return " or ".join(map(in_words, get_args(declared)))
    if get_origin(declared) is Literal:
        return f"one of {get_args(declared)}"
    words = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "True or False",
        NoneType: "None",
    }
    plain = getattr(declared, "__qualname__", "") if isinstance(declared, type) else ""
    return words.get(declared) or (
        plain
        if plain and not get_args(declared)
        else re.sub(r"(typing|collections\.abc)\.", "", str(declared))
    )


def _type_remedy(declared: Field, value: Any) -> str:
    made = getattr(value, "Config", value)
    kinds = (declared.type, *get_args(declared.type))
    if isinstance(value, type) and any(
        isinstance(kind, type) and issubclass(made, kind) for kind in kinds
    ):
        return f"Use {made.__qualname__}()."
    if isinstance(value, str) and declared.type == list[str]:
        usual = [] if declared.default_factory is MISSING else declared.default_factory()
        return f"Use a list of texts, such as {usual}." if usual else f"Use [{value!r}]."
    if isinstance(value, PurePath):
        return f"Use {str(value)!r}."
    made = getattr(declared.default_factory, "__qualname__", "<")
    usual = f"Use {made}()." if made[0].isupper() and "<" not in made else "Correct the value."
    return declared.metadata.get("remedy") or (
        f"Use {declared.default!r}."
        if declared.default not in (MISSING, None) and is_typed(declared.default, declared.type)
        else usual
    )
