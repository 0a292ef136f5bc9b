"""Errors that the user sees as a message without a traceback, and `expect`, which reports a wrong value."""

import importlib.metadata
import sys
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


def torch_remedy(error: ImportError) -> str:
    """Returns what to do where `import torch` raises `error`."""
    if isinstance(error, ModuleNotFoundError):  # a script was started with the system's Python
        return f"{sys.executable} has no torch. Run scripts/setup.sh once and use .venv/bin/python."
    version = importlib.metadata.version("torch").partition("+")[0]
    cpu = f"--no-deps --force-reinstall --index-url https://download.pytorch.org/whl/cpu torch=={version}"
    return (
        f"torch cannot be imported: {error}. PyPI's torch is the build for CUDA, and its libraries are not here. Without a GPU install "
        f"the CPU build: pip install {cpu} (or uv pip install). With a GPU install requirements/gpu.lock."
    )
