"""Config fields that declare their limits. `fields/field_limits.py` checks them."""

from copy import copy
from dataclasses import MISSING, field
from functools import partial
from typing import Any

MANY = 10**12
"""A limit for numbers of any useful size."""

LIMITS = ("above", "least", "most", "below")


def number(default: Any = MISSING, *, remedy: str = "", **limits: float | str) -> Any:
    """A config field for a number with limits: above (>), least (>=), most (<=), below (<).

    A limit may be the name of another field of the same config. In a list, tuple or dict the limits apply to every
    number.

    Example: high: float = number(5.0, above="low", remedy="Use 5.")
    """
    if unknown := limits.keys() - set(LIMITS):
        raise TypeError(f"number() has no limits {sorted(unknown)}; it has {sorted(LIMITS)}")
    metadata = {"limits": limits, "remedy": remedy}
    if isinstance(default, (list, dict)):
        metadata["remedy"] = remedy or f"Use {default}."
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)
