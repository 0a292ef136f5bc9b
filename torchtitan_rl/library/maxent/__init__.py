"""MaxEnt-GRPO: the listwise loss, the weights it pulls to, and the controllers of their temperature and prior."""

from torchtitan_rl.library.maxent.controllers import BetaController, MetaController, TauController
from torchtitan_rl.library.maxent.loss import MaxEnt

__all__ = ["BetaController", "MaxEnt", "MetaController", "TauController"]
