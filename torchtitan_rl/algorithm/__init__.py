# ruff: noqa: F401 (this page is the list of names)
"""Objectives: rewards to advantages, log-probabilities to a loss. Pure functions and small controllers; no vLLM, no
collectives. Start at `Algorithm`."""

from .advantages import Advantage, BatchStd, GroupMean, Grpo, Rloo
from .aggregations import Aggregation, SeqMeanTokenMean, SeqSumConst, TokenMean
from .algorithm import Algorithm, LossOutput
from .inputs import LossInputs, Sequences
from .kl import KL, kl_estimate
from .losses import Cispo, Clip, Gspo, ListwiseLoss, PolicyLoss, Reinforce
from .maxent import BetaController, MaxEnt, MetaController, TauController
from .mismatch import Correction, Mismatch, NoCorrection, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate
from .nonfinite import NonFiniteError
from .part import number
from .seed_grpo import SeedGrpo
from .truncation import Truncation
