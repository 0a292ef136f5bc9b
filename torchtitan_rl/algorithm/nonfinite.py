"""Non-finite numbers: found, counted and named before they reach the optimizer."""

import math

import numpy as np
import torch
from torch import Tensor

from torchtitan_rl.errors import SamplerFault, TrainingStopped
from torchtitan_rl.types import Credit, Episode, Member, TrainBatch


class NonFiniteError(TrainingStopped, ArithmeticError):
    """A NaN or infinity in place of a number. The message names the prompt, the sample and the source."""


class SamplerNonFiniteError(NonFiniteError, SamplerFault):
    """The sampler's log-probability of a token is NaN or infinite."""


MASK = (
    'algorithm.nonfinite "mask" leaves such completions and tokens out of the loss and counts them.'
)
ADVICE = {
    "advantage": f"Rewards of this size overflow, or algorithm.advantage divides by 0. {MASK}",
    "reward": f"Correct the reward functions, or grader.weights. {MASK}",
    "sampler": "The engine computed it.",
    "reference": "The reference computed it: the checkpoint in hf_assets_path contains numbers that are not finite.",
    "policy": "The policy computed it: its weights or activations are not finite. Resume from an earlier "
    "checkpoint with a lower trainer.optimizer.lr; in the first step, the start checkpoint is broken.",
}
"""The remedy, by the source of the number."""

SOURCES = {
    "advantages": "advantage",
    "sampler_logprobs": "sampler",
    "reference_logprobs": "reference",
}
"""The source of a batch's columns. The policy computed all others."""


def episode_fault(episode: Episode) -> tuple[str, str] | None:
    """What is not finite in an episode without an advantage; None if all is finite.

    A reward function that returns such a number has failed before (`grader.on_failure`); their sum may still overflow.

    Returns: the source, a key of ADVICE, and a sentence. Example: ("reward", "the total reward is inf")
    """
    if episode.reward is not None and not math.isfinite(episode.reward):
        return "reward", f"the total reward is {episode.reward}"
    completion = episode.completion
    named = {"sampler": completion.sampler_logprobs, "reference": episode.reference_logprobs}
    for source, logprobs in named.items():
        if logprobs is None:
            continue
        faults = np.flatnonzero(~np.isfinite(logprobs) & completion.loss_mask)
        if len(faults):
            token, value = faults[0], logprobs[faults[0]]
            return source, f"the {source}'s log-probability of token {token} is {value}"
    return None


def leave_out(member: Member, source: str, text: str, *, raises: bool) -> None:
    """Take an episode with a fault out of the baseline and the loss.

    Raises:
        NonFiniteError: if `raises`; the episode is then unchanged.
    """
    if raises:
        error = SamplerNonFiniteError if source == "sampler" else NonFiniteError
        raise error(f"{member.name}: {text}. {ADVICE[source]}")
    before = member.episode.credit
    member.episode.credit = Credit(
        left_out=f"not finite: {text}", columns=before.columns, token_columns=before.token_columns
    )


def finite_tokens(mask: Tensor, named: dict[str, Tensor]) -> Tensor:
    """[T] bool: the loss tokens at which all [T] tensors in `named` are finite."""
    finite = mask > 0  # [T]
    for values in named.values():
        finite = finite & torch.isfinite(values)  # [T]
    return finite


def raise_for_token(batch: TrainBatch, named: dict[str, Tensor]) -> None:
    """Raise NonFiniteError for the first loss token that is not finite, naming prompt, sample and quantity."""
    fault = (batch.loss_mask > 0) & ~finite_tokens(batch.loss_mask, named)  # [T]
    position = int(fault.nonzero()[0])
    member = batch.members[int(batch.sequence_ids[position])]
    for quantity, values in named.items():
        value = values[position].item()
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{member.name}: {quantity} of the token with id {int(batch.labels[position])} "
                f"(packed position {position}) is {value}. {ADVICE[SOURCES.get(quantity, 'policy')]}"
            )
