"""`Part`: one piece of an objective, and what the fields of its `Config` may hold."""

import math
import operator
from dataclasses import MISSING, field, fields
from typing import Any, Literal, get_args, get_origin

from torchtitan.config import Configurable

from torchtitan_rl.core.config import OwnConfig
from torchtitan_rl.core.errors import expect


class Part(OwnConfig):
    """A piece of an objective; a subclass without fields of its own needs no `Config`."""


_COMPARISONS = {
    "above": (">", operator.gt),
    "least": (">=", operator.ge),
    "most": ("<=", operator.le),
    "below": ("<", operator.lt),
}


def number(default: Any = MISSING, *, remedy: str = "", **limits: float | str) -> Any:
    """A config field that holds a number within limits: above (>), least (>=), most (<=), below (<; infinity without `most`).

    A limit may name another field of the same config. A default of None allows None.

    Example: high: float = number(5.0, above="low", remedy="Use 5.")
    """
    limits = limits if "most" in limits else {"below": math.inf} | limits
    return field(default=default, metadata={"limits": limits, "remedy": remedy or f"Use {default}."})


def check_fields(config: Configurable.Config, path: str) -> None:
    """Check every choice (a field of type Literal) and `number` of a config and of the parts in it.

    A config function may set anything, and the command line only warns of a choice that does not exist.

    Raises:
        UserError: naming the field by its full `path`.
    """
    for one in fields(config):
        value, name = getattr(config, one.name), f"{path}.{one.name}"
        if isinstance(value, Configurable.Config):
            check_fields(value, name)
        elif get_origin(one.type) is Literal:
            choices = get_args(one.type)
            expect(value in choices, name, value, f"one of {choices}", f"Use {one.default!r}.")
        elif value is not None or one.default is not None:
            for comparison, limit in one.metadata.get("limits", {}).items():
                sign, holds = _COMPARISONS[comparison]
                bound, whose = (getattr(config, limit), f" ({limit})") if isinstance(limit, str) else (limit, "")
                expect(holds(value, bound), name, value, f"a number {sign} {bound}{whose}", one.metadata["remedy"])
