"""Checks that the arguments of a call have their declared types. Python does not, and would fail later without their names."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, get_type_hints

from torchtitan_rl.fields.field_limits import expected_type

Called = TypeVar("Called", bound=Callable[..., Any])


def typed(called: Called) -> Called:
    """Decorator of a function, or of a class: its `__init__`. Each call checks the arguments.

    Raises TypeError, naming the argument, its value and the declared type.

    Example: ToolEnvironment([], seconds="5") raises "seconds = '5': expected a valid number"
    """
    if inspect.isclass(called):
        called.__init__ = typed(called.__init__)
        return called
    signature = inspect.signature(called)
    hints = cache(lambda: get_type_hints(called))  # at the first call, when all names exist

    @wraps(called)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if expected := expected_type(value, hints().get(name, Any)):
                raise TypeError(f"{name} = {value!r:.200}: expected {expected}")
        return called(*args, **kwargs)

    return checked


def check_above_zero(**numbers: float) -> None:
    """Raises ValueError for an argument that is not above 0."""
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} = {value}: expected more than 0")
