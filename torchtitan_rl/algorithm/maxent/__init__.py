"""MaxEnt-GRPO: the listwise loss, the weights it pulls to, and the controllers of their temperature and prior."""

from .controllers import BetaController, MetaController, TauController
from .loss import MaxEnt

__all__ = ["BetaController", "MaxEnt", "MetaController", "TauController"]
