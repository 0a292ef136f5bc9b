"""MaxEnt-GRPO: the listwise loss, its target weights, and the controllers of tau and beta."""

from torchtitan_rl.algorithm.losses.maxent.controllers import (
    BetaController,
    MetaController,
    TauController,
)
from torchtitan_rl.algorithm.losses.maxent.maxent_loss import MaxEnt, maxent_class_defaults
