"""Numbers that are not finite never reach the optimizer silently: found, counted, named."""

import math

import torch
from torch import Tensor

from torchtitan_rl.run.errors import TrainingStopped
from torchtitan_rl.types import Episode, TrainBatch


class NonFiniteError(TrainingStopped, ArithmeticError):
    """A NaN or infinity where a number was needed; the message names the prompt, the sample and what produced it."""


REMEDY = 'Set algorithm.nonfinite = "mask" to leave such completions and tokens out of the loss and count them.'


def episode_fault(episode: Episode) -> str | None:
    """What of this episode is not finite, in words; None when all is well.

    Example: "reward function 'correct' returned nan"
    """
    if episode.reward is not None and not math.isfinite(episode.reward):
        for function, value in episode.reward_breakdown.items():
            if value is not None and not math.isfinite(value):
                return f"reward function {function!r} returned {value}"
        return f"the total reward is {episode.reward}"
    for whose, logprobs in (("sampler", episode.sampler_logprobs), ("reference", episode.reference_logprobs or [])):
        for position, logprob in enumerate(logprobs):
            if not math.isfinite(logprob):
                return f"the {whose}'s log-probability of token {position} is {logprob}"
    if not math.isfinite(episode.advantage):
        return f"the advantage is {episode.advantage}"
    return None


def raise_for_episode(episode: Episode, fault: str) -> None:
    """Raise NonFiniteError naming the episode."""
    raise NonFiniteError(f"prompt {episode.prompt_idx}, sample {episode.sample_idx}: {fault}. {REMEDY}")


def finite_tokens(mask: Tensor, named: dict[str, Tensor]) -> Tensor:
    """[T] bool: loss tokens at which every one of the [T] tensors in `named` is finite."""
    finite = mask > 0  # [T]
    for values in named.values():
        finite = finite & torch.isfinite(values)  # [T]
    return finite


def raise_for_token(batch: TrainBatch, named: dict[str, Tensor]) -> None:
    """Raise NonFiniteError naming prompt, sample and quantity at the first loss token that is not finite."""
    fault = (batch.loss_mask > 0) & ~finite_tokens(batch.loss_mask, named)  # [T]
    position = int(fault.nonzero()[0])
    sequence = int(batch.sequence_ids[position])
    quantity, value = next((name, v[position].item()) for name, v in named.items() if not torch.isfinite(v[position]))
    if batch.sample_ids is None:
        sample = f"episode {batch.episode_indices[sequence]} of the step"
    else:
        sample = f"sample {batch.sample_ids[sequence]}"
    raise NonFiniteError(
        f"prompt {int(batch.group_ids[sequence])}, {sample}: {quantity} of the token with id "
        f"{int(batch.labels[position])} (packed position {position}) is {value}. {REMEDY}"
    )
