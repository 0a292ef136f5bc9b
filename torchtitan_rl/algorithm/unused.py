"""Settings of the objective that have no effect with one of its parts are errors."""

from collections.abc import Sequence
from operator import attrgetter

from torchtitan_rl.errors import expect
from torchtitan_rl.fields.own_config import OwnConfig


def expect_defaults(objective: OwnConfig.Config, names: Sequence[str], part: str) -> None:
    """Raise UserError if one of these fields of the objective, an `Algorithm.Config`, is not at its default.

    Example: expect_defaults(objective, ["credit"], "Gdpo") with credit "turn" says
    "algorithm.credit = 'turn': expected episode with Gdpo. Leave it out."
    """
    for name in names:
        value, default = attrgetter(name)(objective), attrgetter(name)(type(objective)())
        field, expected = f"algorithm.{name}", f"{default} with {part}"
        expect(value == default, field, value, expected, "Leave it out.")
