# ruff: noqa: F401 (this page is the list of names)
"""The training objective: rewards to advantages, log-probabilities to a loss. Start at `Algorithm`.

Everything here is a pure function or a small object. Nothing imports vLLM or communicates between ranks.
"""

from torchtitan_rl.algorithm.advantages import Advantage, Grpo, RewardedGroup
from torchtitan_rl.algorithm.algorithm import Algorithm, LossOutput
from torchtitan_rl.algorithm.episodes import set_token_advantages
from torchtitan_rl.algorithm.group_filter import GroupFilter
from torchtitan_rl.algorithm.kl import KL, kl_estimate
from torchtitan_rl.algorithm.losses.loss import (
    Aggregation,
    Clip,
    Loss,
    LossInputs,
    Sequences,
    TokenLoss,
    TokenMean,
)
from torchtitan_rl.algorithm.mismatch import (
    Correction,
    Mismatch,
    NoCorrection,
)
from torchtitan_rl.algorithm.nonfinite import NonFiniteError
from torchtitan_rl.algorithm.truncation import Truncation
from torchtitan_rl.fields.number import number
