"""Errors that the user sees as a message without a traceback, and `expect`, which reports a wrong value."""

from typing import Any


class UserError(ValueError):
    """Wrong input: the message names the field, the value seen, what was expected and the remedy. Exit code 2."""


class TrainingStopped(Exception):
    """Training stopped itself before a harmful update; the last checkpoint is good. Exit code 3."""


class SamplerFault(TrainingStopped):
    """The sampler's log-probabilities are not the policy's. Every rank raises it, so all can compare the weights."""

    evidence = ""
    """What is known of the engine's weights, as sentences. The loop adds it."""

    def __str__(self) -> str:
        return f"{super().__str__()} {self.evidence}".rstrip()


def expect(holds: bool, field: str, value: Any, expected: str, remedy: str) -> None:
    """Raise UserError unless `holds`.

    Example: expect(eps > 0, "algorithm.loss.eps_low", eps, "more than 0", "Use 0.2, the paper's value.")
    """
    if not holds:
        raise UserError(f"{field} = {value!r}: expected {expected}. {remedy}")
