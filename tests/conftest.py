"""Imported before any test: the device's adaptations must precede torchtitan and vLLM."""

from torchtitan_rl import device  # noqa: F401
