"""Supervised fine-tuning: the negative log-likelihood of demonstrations, completions that the data bring along."""

from torch import Tensor

from torchtitan_rl.algorithm.losses.loss import TokenLoss
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs
from torchtitan_rl.errors import UserError
from torchtitan_rl.types import Prompt

HELD_OUT_LOSS = "evaluation/loss"
"""The metric of demonstrations' held-out loss."""


class Nll(TokenLoss):
    """l_t = -log pi of the demonstrations' tokens: supervised fine-tuning. Rewards, if there are any, are only reported."""

    learns_from = "demonstrations"
    ignores = (
        "kl.coef",
        "mismatch",
        "old_logprobs",
        "credit",
        "zero_variance",
        "seed_grpo",
        "truncation",
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
