"""Supervised fine-tuning: the negative log-likelihood of demonstrations, completions that the data bring along."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan_rl.algorithm.algorithm import Algorithm
from torchtitan_rl.algorithm.losses.loss import LossInputs, TokenLoss
from torchtitan_rl.algorithm.mismatch import NoCorrection
from torchtitan_rl.algorithm.truncation import Truncation
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.types import Prompt

HELD_OUT_LOSS = "evaluation/loss"
"""The metric of demonstrations' held-out loss."""


class Nll(TokenLoss):
    """l_t = -log pi of the demonstrations' tokens: supervised fine-tuning. Rewards, if there are any, are only reported."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        def check_objective(self, objective: Algorithm.Config) -> None:
            """Raise UserError for a setting that needs sampled completions or their rewards."""
            unused = {
                "kl.coef": (objective.kl.coef, 0.0),
                "mismatch": (type(objective.mismatch), NoCorrection.Config),
                "old_logprobs": (objective.old_logprobs, "policy"),
                "credit": (objective.credit, "episode"),
                "zero_variance": (objective.zero_variance, "keep"),
                "seed_grpo": (objective.seed_grpo, None),
                "truncation": (objective.truncation, Truncation.Config()),
            }
            for name, (value, only) in unused.items():
                expected = f"{only} with the loss Nll, which learns from demonstrations: nothing is sampled or compared"
                expect(value == only, f"algorithm.{name}", value, expected, "Leave it out.")

    uses_rewards = False
    uses_advantages = False
    from_engine = False
    uses_ratio = False

    def validate_group_size(self, n: int) -> None:
        expect(
            n == 1, "sampling.n", n, "1 with the loss Nll, as a row has one completion", "Use 1."
        )

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.logprobs  # [T]


def check_demonstrated(prompt: Prompt) -> None:
    """Raise UserError for a prompt of a run that learns from demonstrations and that has none."""
    if prompt.demonstration is None:
        raise UserError(
            f"algorithm.loss learns from demonstrations: expected a demonstration of every prompt, but {prompt.text[-80:]!r} has none. Set "
            "task.demonstrations to last or all for rows, or prompts.demonstrate to a function that writes the completion."
        )
