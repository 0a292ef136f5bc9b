"""Checks of what a part of the objective returned. It may be a user's class, and a wrong shape would train silently."""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from torchtitan_rl.core.errors import UserError


def tensor_from(part: object, field: str, returned: Any, shape: torch.Size | tuple, what: str) -> Tensor:
    """Returns the tensor. Raises UserError, naming `field` and the part's class, if it is none of this shape.

    Args:
        what: its meaning and the remedy. Example: "[T], a loss for each token. Leave the mean to
            algorithm.aggregation."
    """
    if isinstance(returned, Tensor) and returned.shape == shape:
        return returned
    found = type(returned).__name__
    if isinstance(returned, Tensor):
        found = f"a tensor of shape {list(returned.shape)}"
    raise UserError(f"{field}: {_name(part)} returned {found}: expected a tensor of shape {list(shape)} = {what}")


def numbers_from(part: object, field: str, returned: Any, like: Any) -> Any:
    """Returns nested lists of floats in the shape of `like`; for a number that is no list, a float.

    Raises UserError, naming `field` and the part's class, for another number of values or a value that is no number.

    Example: numbers_from(part, "algorithm.advantage", array([-1, 1]), [0.5, 1.5]) == [-1.0, 1.0]
    """
    if not isinstance(like, list):
        try:
            if not isinstance(returned, (str, bytes)):
                return float(returned)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
        raise UserError(f"{field}: {_name(part)} returned {returned!r:.80}: expected a number")
    ordered = hasattr(returned, "__iter__") and not isinstance(returned, (str, bytes, Mapping, Set))
    if not ordered or getattr(returned, "shape", None) == ():
        raise UserError(f"{field}: {_name(part)} returned {type(returned).__name__}: expected a list of {len(like)}")
    values = list(returned)
    if len(values) != len(like):
        raise UserError(
            f"{field}: {_name(part)} returned {len(values)} values for {len(like)}: expected one for each, "
            "in the same order. With another number, credit would go to the wrong completions."
        )
    return [numbers_from(part, field, value, numbers) for value, numbers in zip(values, like, strict=True)]


def pairs_from(part: object, returned: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns what `loss_metrics` of the part returned. Raises UserError if it is no dict of (mean, weight), 0-d each."""
    if isinstance(returned, dict) and all(_is_pair(value) for value in returned.values()):
        return returned
    raise UserError(
        f"algorithm.loss: {_name(part)}.loss_metrics returned {returned!r:.80}: expected a dict with a tuple of two 0-d tensors, "
        "(mean, weight), by each name. Return one."
    )


def check_gradient(part: object, field: str, loss: Tensor, logprobs: Tensor) -> None:
    """Raise UserError if `loss` was computed without a gradient although the policy's `logprobs` have one."""
    if logprobs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            f"{field}: {_name(part)} returned a loss without a gradient, so nothing would be learned. Compute it from "
            "inputs.logprobs or inputs.log_ratio, without detach(), item(), numpy() or torch.no_grad()."
        )


def _is_pair(value: object) -> bool:
    """Whether it is a tuple of two 0-d tensors."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(getattr(one, "shape", None) == () for one in value)


def _name(part: object) -> str:
    return type(part).__qualname__
