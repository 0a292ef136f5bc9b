"""How a wrong configuration is reported: the field, the value, what was expected, the remedy."""

from typing import Any


def expect(holds: bool, field: str, value: Any, expected: str, remedy: str) -> None:
    """Raise ValueError unless `holds`.

    Example: expect(eps > 0, "Clip.Config.eps_low", eps, "a number > 0", "Use 0.2, the paper's value.")
    """
    if not holds:
        raise ValueError(f"{field} = {value!r}: expected {expected}. {remedy}")
