"""The weight sync's settings. They are apart from it, whose imports take seconds: `--help` needs the settings alone."""

from dataclasses import dataclass

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import number


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig(Configurable.Config):
    """`WeightSync.Config`."""

    check_interval: int = number(50, least=0, remedy="0 checks the first push alone in full.")
    """Pushes from one full check to the next; 0: only the first push. On a GPU, a full check is a push with the
    probe. On a CPU every push has the probe, and a full check compares the packed weights."""
