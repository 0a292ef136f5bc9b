"""The errors whose message, not whose traceback, is for the user, and the one way to report a wrong value."""

from typing import Any


class UserError(ValueError):
    """Wrong input: the message names the field, the value seen, what was expected and the remedy. Exit code 2."""


class TrainingStopped(Exception):
    """Training ended itself before an update that would have done damage; the last checkpoint is good. Exit code 3."""


def expect(holds: bool, field: str, value: Any, expected: str, remedy: str) -> None:
    """Raise UserError unless `holds`.

    Example: expect(eps > 0, "algorithm.loss.eps_low", eps, "more than 0", "Use 0.2, the paper's value.")
    """
    if not holds:
        raise UserError(f"{field} = {value!r}: expected {expected}. {remedy}")
