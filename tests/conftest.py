"""Imported before any test: the device's adaptations must precede torchtitan and vLLM."""

from torchtitan_rl.core import device  # noqa: F401
