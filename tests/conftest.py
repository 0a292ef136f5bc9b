"""Imported before any test: the device's adaptations must precede torchtitan and vLLM, and are those of a run."""

from torchtitan_rl import cpu
from torchtitan_rl.core import device  # noqa: F401

cpu.install()
