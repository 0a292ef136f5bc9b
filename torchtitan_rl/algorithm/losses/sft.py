"""Supervised fine-tuning: the negative log-likelihood of demonstrations, completions that the data bring along."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.algorithm.unused import expect_defaults
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Prompt

if TYPE_CHECKING:
    from torchtitan_rl.algorithm.algorithm import Algorithm

HELD_OUT_LOSS = "evaluation/loss"
"""The metric of demonstrations' held-out loss."""


class Nll(TokenLoss):
    """l_t = -log pi of the demonstrations' tokens: supervised fine-tuning. Rewards, if there are any, are only reported."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenLoss.Config):
        def check_objective(self, objective: "Algorithm.Config") -> None:
            """Raise UserError for a setting that needs sampled completions or their rewards."""
            names = ("kl.coef", "mismatch", "old_logprobs", "credit", "zero_variance", "seed_grpo")
            why = "the loss Nll, which learns from demonstrations: nothing is sampled or compared"
            expect_defaults(objective, (*names, "truncation"), why)

    learns_from = "demonstrations"

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.logprobs  # [T]


def check_demonstrated(prompt: Prompt) -> None:
    """Raise UserError for a prompt of a run that learns from demonstrations and that has none."""
    if prompt.demonstration is None:
        raise UserError(
            f"algorithm.loss learns from demonstrations: expected a demonstration of every prompt, but {prompt.text[-80:]!r} has none. Set "
            "task.demonstrations to last or all for rows, or prompts.demonstrate to a function that writes the completion."
        )
