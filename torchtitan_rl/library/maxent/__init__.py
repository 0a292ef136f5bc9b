"""MaxEnt-GRPO: the listwise loss, its target weights, and the controllers of tau and beta."""

from torchtitan_rl.library.maxent.controllers import BetaController, MetaController, TauController
from torchtitan_rl.library.maxent.listwise import ListwiseLoss
from torchtitan_rl.library.maxent.loss import MaxEnt, maxent_class_defaults
