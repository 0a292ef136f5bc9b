"""On-policy distillation: a frozen teacher scores the policy's samples; its log-probabilities become advantages."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_rl.algorithm.kl import kl_estimate
from torchtitan_rl.algorithm.losses.loss import Clip, LossInputs, TokenLoss
from torchtitan_rl.algorithm.mismatch import NoCorrection
from torchtitan_rl.errors import expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.types import Episode, Group, flat

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm

DIVERGENCE = "divergence"
"""The token column that says how far the teacher is at each token. A loss with `divergence_beta` reads it with gradient;
episodes keep it for the sample tables."""
LOGPROBS = "teacher_logprobs"
"""The token column with log nu, which `Teacher` sets."""
LOG_RATIOS = "teacher_log_ratios"
"""The token column with log mu - log nu, which `Distill` sets."""


class Distill(Clip):
    """The clip loss with A_t = A - coef (log mu - log nu): mu the sampler, nu the teacher, A of the rewards.

    On-policy its expected gradient is that of coef KL(pi || nu) at each sampled position. The teacher's part needs
    neither rewards nor a group, so groups with equal rewards learn too. As in tinker-cookbook's train_on_policy.py.
    """

    needs_teacher = True
    uses_rewards = False
    token_columns = (LOG_RATIOS,)
    source_columns = (LOGPROBS,)

    @dataclass(kw_only=True, slots=True)
    class Config(Clip.Config):
        coef: float = number(1.0, above=0)
        """Weight of the teacher's part of the advantage."""
        rewards: bool = False
        """Whether the rewards' advantages are added: distillation and RL in one step. If not, rewards are only
        reported."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            keep, remedy = (
                objective.zero_variance,
                "The teacher's part learns from groups with equal rewards too.",
            )
            expect(
                keep == "keep",
                "algorithm.zero_variance",
                keep,
                '"keep" with the loss Distill',
                remedy,
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.uses_advantages = config.rewards

    def validate_group_size(self, n: int) -> None:
        baseline = "at least 2 with algorithm.loss.rewards, because the group is its own baseline"
        expect(
            n >= 2 or not self.config.rewards,
            "sampling.n",
            n,
            baseline,
            "Raise it, or leave rewards out.",
        )

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        for episode in flat(groups):
            columns = episode.credit.token_columns
            columns[LOG_RATIOS] = episode.completion.sampler_logprobs - columns[LOGPROBS]  # [L]

    def __call__(self, inputs: LossInputs) -> Tensor:
        return super().__call__(self._taught(inputs))  # [T]

    def clipped(self, inputs: LossInputs, ratio: Tensor) -> dict[str, Tensor]:
        return super().clipped(self._taught(inputs), ratio)

    def _taught(self, inputs: LossInputs) -> LossInputs:
        """The inputs with the teacher's part in the advantages."""
        return replace(
            inputs,
            advantages=inputs.advantages - self.config.coef * inputs.token_columns[LOG_RATIOS],
        )

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """KL(mu || nu) by two estimators, and the share of the tokens that the teacher finds more likely."""
        log_ratio, count = inputs.token_columns[LOG_RATIOS], inputs.mask.sum()  # [T], 0-d

        def mean(values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(inputs.mask > 0, values, 0.0).sum() / count.clamp(min=1), count

        return {
            "teacher/kl_k1": mean(kl_estimate(log_ratio, "k1")),
            "teacher/kl_k3": mean(kl_estimate(log_ratio, "k3")),
            "teacher/prefers_fraction": mean((log_ratio < 0).to(log_ratio.dtype)),
        }


class ExactDistill(TokenLoss):
    """l_t = D_beta(pi || nu) over the whole vocabulary at each position: pi the policy, nu the teacher.

    D_1 is the reverse KL(pi || nu), D_0 the forward KL(nu || pi); between them is the generalised Jensen-Shannon
    divergence of models/divergence.py. It learns from no reward.
    """

    needs_teacher = True
    uses_rewards = False
    uses_advantages = False
    uses_ratio = False

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        beta: float = number(1.0, least=0, most=1)
        """1: reverse KL; 0: forward KL; between: generalised Jensen-Shannon divergence."""
        demonstrations: bool = False
        """Whether the positions are those of the data's completions (off-policy distillation), instead of the policy's
        samples."""

        def check_objective(self, objective: "Algorithm.Config") -> None:
            unused = {
                "mismatch": (objective.mismatch, NoCorrection.Config()),
                "old_logprobs": (objective.old_logprobs, "policy"),
                "credit": (objective.credit, "episode"),
                "zero_variance": (objective.zero_variance, "keep"),
                "seed_grpo": (objective.seed_grpo, None),
            }
            for name, (value, only) in unused.items():
                expected = (
                    f"{only} with the loss ExactDistill, which has neither a ratio nor advantages"
                )
                expect(value == only, f"algorithm.{name}", value, expected, "Leave it out.")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.divergence_beta = config.beta
        self.from_engine = not config.demonstrations

    def validate_group_size(self, n: int) -> None:
        one = "1 with algorithm.loss.demonstrations, as a row has one completion"
        expect(n == 1 or self.from_engine, "sampling.n", n, one, "Use 1.")

    def __call__(self, inputs: LossInputs) -> Tensor:
        return inputs.token_columns[DIVERGENCE]  # [T]

    def loss_metrics(self, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        """The mean of the divergence over tokens."""
        total, count = (self(inputs) * inputs.mask).sum(), inputs.mask.sum()  # 0-d each
        return {"teacher/divergence": (total / count.clamp(min=1), count)}
