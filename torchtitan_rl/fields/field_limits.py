"""The check of all fields of a config. The launcher imports it, so it imports no torch."""

import math
import operator
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import MANY

_COMPARISONS = {
    "above": ("more than", operator.gt),
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


def check_fields(config: Any, path: str = "") -> None:
    """Check every `number`, choice (Literal) and list of texts in a config and its nested configs.

    Config functions can set any value, and the command line only warns about an unknown choice.

    Raises:
        UserError: names the field by its full `path`.
    """
    for declared in fields(config):
        value, name = getattr(config, declared.name), f"{path}.{declared.name}".lstrip(".")
        kinds = (declared.type, *get_args(declared.type))
        if value is None and NoneType in kinds:
            continue
        choices: list[Any] = []
        for kind in kinds:
            if get_origin(kind) is Literal:
                choices += get_args(kind)
        for key, part in parts(value):
            if is_dataclass(part):
                check_fields(part, f"{name}.{key}".rstrip("."))
            elif choices:
                expect(
                    part in choices,
                    name,
                    value,
                    f"one of {tuple(choices)}",
                    f"Use {declared.default!r}.",
                )
            elif declared.type == list[str]:
                filled = isinstance(part, str) and part != ""
                expect(
                    filled,
                    name,
                    value,
                    "texts of at least one character",
                    "Correct the value.",
                )
        if "limits" in declared.metadata:
            check_number(declared, value, name, config)


def check_number(declared: Field, value: Any, name: str, config: Any = None) -> None:
    """Raise UserError, with the field called `name`, unless `value` is within the declared limits of a `number`.

    Args:
        config: contains the fields that the limits name.
    """
    bounds: dict[str, float] = {}
    words: list[str] = []
    for how, limit in declared.metadata["limits"].items():
        whose = ""
        if isinstance(limit, str):
            whose = f" ({limit})"
            limit = getattr(config, limit)
        bounds[how] = limit
        if math.isfinite(limit):
            words.append(f"{_COMPARISONS[how][0]} {limit}{whose}")
    expected = " and ".join(words) or "a finite number"
    remedy = declared.metadata["remedy"] or _usual(declared.metadata["usual"], bounds)
    types = {declared.type, *get_args(declared.type)}
    whole = int in types and float not in types
    unlimited = "most" in bounds and math.isinf(bounds["most"])
    for _, element in parts(value):
        is_number = isinstance(element, int) or (isinstance(element, float) and not whole)
        # NumPy's numbers are refused, because they are not written as JSON.
        typed = is_number and not isinstance(element, bool)
        expect(typed, name, value, "a whole number" if whole else "a number", remedy)
        expect(_is_within(element, bounds), name, value, expected, remedy)
        sized = abs(element) <= MANY or (unlimited and element == math.inf)
        bound = f"at most {MANY}" if element > 0 else f"at least -{MANY}"
        expect(sized, name, value, bound, remedy)


def _is_within(element: float, bounds: dict[str, float]) -> bool:
    for how, bound in bounds.items():
        _, holds = _COMPARISONS[how]
        if not holds(element, bound):
            return False
    return True


def _usual(default: Any, bounds: dict[str, float]) -> str:
    """The default as a remedy; or a limit, if the default is beyond one, as another field's value may be a limit."""
    for usual in (default, bounds.get("least"), bounds.get("most")):
        if usual is None or usual is MISSING:
            continue
        numbers = [element for _, element in parts(usual) if element is not None]
        if all(_is_within(element, bounds) for element in numbers):
            return f"Use {usual}."
    return "Correct the value."


def parts(value: Any) -> Iterable[tuple[str, Any]]:
    """(key, value) for each item of a dict, ("", value) for each item of a list or tuple, ("", value) for any other
    value."""
    if isinstance(value, dict):
        return value.items()
    items = value if isinstance(value, (list, tuple)) else [value]
    return [("", item) for item in items]
