"""Policy losses over packed one-dimensional tensors."""

from .base import PolicyLoss
from .cispo import Cispo
from .clip import Clip
from .gspo import Gspo
from .maxent import MaxEnt
from .reinforce import Reinforce

__all__ = ["Cispo", "Clip", "Gspo", "MaxEnt", "PolicyLoss", "Reinforce"]
