"""The checkpointer's settings. They are apart from it, whose imports take seconds: `--help` needs the settings alone."""

from dataclasses import dataclass

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import number


@dataclass(kw_only=True, slots=True)
class CheckpointerConfig(Configurable.Config):
    """`Checkpointer.Config`."""

    enable: bool = True
    """Save checkpoints. A run without them cannot be resumed."""

    interval: int = number(50, least=1, remedy="Use 50; --checkpoint.no-enable saves none.")
    """Steps between checkpoints. The last step of a run is always saved, also if a signal stops it."""

    keep_latest_k: int = number(2, least=0, remedy="Use 2; 0 keeps all.")
    """Number of newest checkpoints to keep, besides the best one by evaluation. 0 keeps all."""
