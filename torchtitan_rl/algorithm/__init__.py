# ruff: noqa: F401 (this page is the list of names)
"""The training objective: rewards to advantages, log-probabilities to a loss. Start at `Algorithm`.

Everything here is a pure function or a small object. Nothing imports vLLM or communicates between ranks.
"""

from torchtitan_rl.algorithm.advantages.advantage import Advantage, RewardedGroup
from torchtitan_rl.algorithm.advantages.entropy_bonus import EntropyBonus
from torchtitan_rl.algorithm.advantages.gdpo import Gdpo
from torchtitan_rl.algorithm.advantages.grpo import BatchStd, GroupMean, Grpo, Rloo
from torchtitan_rl.algorithm.advantages.max_rl import MaxRl
from torchtitan_rl.algorithm.aggregation import (
    Aggregation,
    SeqMeanTokenMean,
    SeqSumConst,
    TokenMean,
)
from torchtitan_rl.algorithm.algorithm import Algorithm, LossOutput
from torchtitan_rl.algorithm.credit import GroupFilter
from torchtitan_rl.algorithm.episodes import draft_episodes, set_token_advantages
from torchtitan_rl.algorithm.kl import KL, kl_estimate
from torchtitan_rl.algorithm.losses.cispo import Cispo
from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.distillation import Distill, ExactDistill
from torchtitan_rl.algorithm.losses.dppo import Dppo
from torchtitan_rl.algorithm.losses.gmpo import Gmpo
from torchtitan_rl.algorithm.losses.gspo import Gspo
from torchtitan_rl.algorithm.losses.loss import Loss, Source, TokenLoss, token_loss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, Sequences
from torchtitan_rl.algorithm.losses.maxent import (
    BetaController,
    MaxEnt,
    MetaController,
    TauController,
    maxent_class_defaults,
)
from torchtitan_rl.algorithm.losses.off_policy_mask import OffPolicyMask
from torchtitan_rl.algorithm.losses.optimal_baseline import OptimalBaseline
from torchtitan_rl.algorithm.losses.reinforce import Reinforce
from torchtitan_rl.algorithm.losses.role_baseline import RoleBaseline
from torchtitan_rl.algorithm.losses.sapo import Sapo
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.algorithm.losses.sft import Nll
from torchtitan_rl.algorithm.losses.squared_log_ratio import SquaredLogRatio
from torchtitan_rl.algorithm.losses.target_entropy import TargetEntropy
from torchtitan_rl.algorithm.losses.top_entropy import TopEntropy
from torchtitan_rl.algorithm.losses.vespo import Vespo
from torchtitan_rl.algorithm.mismatch import (
    Correction,
    Mismatch,
    NoCorrection,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)
from torchtitan_rl.algorithm.nonfinite import NonFiniteError
from torchtitan_rl.algorithm.truncation import Truncation
from torchtitan_rl.fields.number import number
