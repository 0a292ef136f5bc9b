"""On-policy distillation: a frozen teacher scores the policy's samples; its log-probabilities become advantages."""

from dataclasses import dataclass, replace

from torch import Tensor

from torchtitan_rl.algorithm.kl import kl_estimate
from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.loss import TEACHER_LOGPROBS, TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.fields.number import number
from torchtitan_rl.types import Episode, Group, flat

DIVERGENCE = "divergence"
"""The token column that says how far the teacher is at each token. A loss with `divergence_beta` reads it with gradient;
episodes keep it for the sample tables."""
LOG_RATIOS = "teacher_log_ratios"
"""The token column with log mu - log nu, which `Distill` sets."""


class Distill(Clip):
    """The clip loss with A_t = A - coef (log mu - log nu): mu the sampler, nu the teacher, A of the rewards.

    On-policy its expected gradient is that of coef KL(pi || nu) at each sampled position. The teacher's part needs
    neither rewards nor a group, so groups with equal rewards learn too. As in tinker-cookbook's train_on_policy.py.
    """

    reads = (TEACHER_LOGPROBS, LOG_RATIOS)
    ignores = ("zero_variance",)  # groups with equal rewards learn too

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        coef: float = number(1.0, above=0)
        """Weight of the teacher's part of the advantage."""
        rewards: bool = False
        """Whether the rewards' advantages are added: distillation and RL in one step. If not, rewards are only
        reported."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.learns_from = "advantages" if config.rewards else "samples"

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for episode in flat(groups):
            columns, log_mu = episode.credit.token_columns, episode.completion.sampler_logprobs
            columns[LOG_RATIOS] = log_mu - columns[TEACHER_LOGPROBS]  # [L]

    def __call__(self, inputs: LossInputs) -> Tensor:
        """[T]. It logs KL(mu || nu) by two estimators, and the share of the tokens that the teacher finds more likely."""
        log_ratio = inputs.token_columns[LOG_RATIOS]  # [T]
        inputs.log_metric("teacher/kl_k1", kl_estimate(log_ratio, "k1"))
        inputs.log_metric("teacher/kl_k3", kl_estimate(log_ratio, "k3"))
        inputs.log_metric("teacher/prefers_fraction", (log_ratio < 0).to(log_ratio.dtype))
        advantages = inputs.advantages - self.config.coef * log_ratio  # [T]
        return super().__call__(replace(inputs, advantages=advantages))  # [T]


class ExactDistill(TokenLoss):
    """l_t = D_beta(pi || nu) over the whole vocabulary at each position: pi the policy, nu the teacher.

    D_1 is the reverse KL(pi || nu), D_0 the forward KL(nu || pi); between them is the generalised Jensen-Shannon
    divergence of models/divergence.py. It learns from no reward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        beta: float = number(1.0, least=0, most=1)
        """1: reverse KL; 0: forward KL; between: generalised Jensen-Shannon divergence."""
        demonstrations: bool = False
        """Whether the positions are those of the data's completions (off-policy distillation), instead of the policy's
        samples."""

    ignores = ("mismatch", "old_logprobs", "credit", "zero_variance", "seed_grpo")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.divergence_beta = config.beta
        self.learns_from = "demonstrations" if config.demonstrations else "samples"

    def __call__(self, inputs: LossInputs) -> Tensor:
        divergence = inputs.token_columns[DIVERGENCE]  # [T]
        inputs.log_metric("teacher/divergence", divergence)
        return divergence
