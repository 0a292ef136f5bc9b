"""MaxEnt-GRPO: the weights of a group's completions, and the controllers that move their temperature and prior."""

from .controllers import BetaController, MetaController, TauController
from .weights import entropy, is_neutral, listwise_weights, reward_distribution

__all__ = [
    "BetaController",
    "MetaController",
    "TauController",
    "entropy",
    "is_neutral",
    "listwise_weights",
    "reward_distribution",
]
