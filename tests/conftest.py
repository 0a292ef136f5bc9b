"""Imported before any test: the device's adaptations must precede torchtitan and vLLM; events are heard as in a run."""

from torchtitan_rl.core import device  # noqa: F401

# isort: split
from torchtitan_rl.core import events
from torchtitan_rl.observability.terminal import Terminal
from torchtitan_rl.resilience.output_limit import BoundedOutput

events.listen(Terminal())
events.listen(BoundedOutput())
