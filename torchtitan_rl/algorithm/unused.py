"""Settings of the objective that have no effect with one of its parts are errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.own_config import OwnConfig


class ObjectivePart(OwnConfig):
    """An advantage or a loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        def check_objective(self, objective: OwnConfig.Config) -> None:
            """Raise UserError if a setting of the objective, an `Algorithm.Config`, does not go with this part."""
            expect_defaults(objective, self._owner.ignores, self._owner.__name__)

    ignores: ClassVar[tuple[str, ...]] = ()
    """Fields of the objective that have no effect with it, and must have their defaults."""


def expect_defaults(objective: OwnConfig.Config, names: Sequence[str], part: str) -> None:
    """Raise UserError if one of these fields of the objective, an `Algorithm.Config`, is not at its default.

    Example: expect_defaults(objective, ["credit"], "Gdpo") with credit "turn" says
    "algorithm.credit = 'turn': expected episode with Gdpo. Leave it out."
    """
    for name in names:
        value, default = attrgetter(name)(objective), attrgetter(name)(type(objective)())
        field, expected = f"algorithm.{name}", f"{default} with {part}"
        expect(value == default, field, value, expected, "Leave it out.")
