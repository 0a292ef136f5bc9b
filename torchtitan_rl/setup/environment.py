"""Placeholder until merged."""
from torchtitan_rl.core.device import check_environment  # noqa: F401
