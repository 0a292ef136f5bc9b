"""An objective whose parts raise if they return another shape than they must. They may be a user's, and would train silently."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from torchtitan_rl.common.returned import check_gradient, numbers_from, pairs_from, tensor_from
from torchtitan_rl.core.algorithm import (
    Aggregation,
    Algorithm,
    Correction,
    Loss,
    LossInputs,
    Mismatch,
    Sequences,
    TokenLoss,
)
from torchtitan_rl.core.errors import UserError


def checked(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm, whose parts now raise UserError, naming the field and their class, where they return another shape."""
    loss, credit = algorithm.policy_loss, algorithm.credit
    algorithm.mismatch = _mismatch(algorithm.mismatch)
    algorithm.aggregation = _aggregation(algorithm.aggregation)
    _check(loss, "terms", lambda found, inputs, _: _check_terms(loss, found, inputs), before=_check_token_loss)
    _check(loss, "loss_metrics", lambda found, _: pairs_from(loss, found))
    field, part = "algorithm.advantage", credit.advantage
    _check(part, "of_group", lambda found, group: numbers_from(part, field, found, list(group.rewards)))
    _check(part, "of_step", lambda found, rewards, _: numbers_from(part, field, found, rewards))
    scale, filtered = credit.seed_grpo, credit.group_filter
    if scale is not None:
        _check(scale, "scale", lambda found, _: numbers_from(scale, "algorithm.seed_grpo", found, 1.0))
    if filtered is not None:
        _check(filtered, "left_out", lambda found, _: _reason(filtered, found))
    return algorithm


def _check(part: Any, method: str, check: Callable[..., Any], *, before: Callable[..., None] | None = None) -> None:
    """Let a method of the part return what `check` returns of its result and arguments. `before` gets part and arguments."""
    original = getattr(part, method)

    @wraps(original)
    def checking(*args: Any) -> Any:
        if before is not None:
            before(part, *args)
        return check(original(*args), *args)

    setattr(part, method, checking)


def _check_token_loss(loss: Loss, inputs: LossInputs, _: Aggregation) -> None:
    """Check what a loss for each token returns, its ratio and where it clips."""
    if not isinstance(loss, TokenLoss):
        return
    _of_tokens(
        loss, loss(inputs), inputs, "a loss for each packed token. Leave sums and means to algorithm.aggregation."
    )
    ratio_loss = loss.ratio_loss
    if ratio_loss is None:
        return
    what = "a value for each packed token of"
    ratio = _of_tokens(ratio_loss, ratio_loss.ratio(inputs), inputs, f"{what} ratio.")  # [T]
    if ratio_loss.uses_ratio:
        _of_tokens(ratio_loss, ratio_loss.log_ratio(inputs), inputs, f"{what} log_ratio.")
        for where in ratio_loss.clipped(inputs, ratio).values():
            _of_tokens(ratio_loss, where, inputs, f"{what} clipped.")


def _of_tokens(loss: Loss, found: Any, inputs: LossInputs, what: str) -> Tensor:
    """Returns a loss's [T] result. Raises UserError if it has another shape."""
    return tensor_from(loss, "algorithm.loss", found, inputs.mask.shape, f"[T], {what}")


def _check_terms(loss: Loss, found: dict[str, Tensor], inputs: LossInputs) -> dict[str, Tensor]:
    """Check a loss's `terms`."""
    for share in found.values():
        tensor_from(loss, "algorithm.loss", share, (), "0-d, each entry of `terms`.")
    check_gradient(loss, "algorithm.loss", found["policy"], inputs.logprobs)
    return found


def _aggregation(aggregation: Aggregation) -> Callable[[Tensor, LossInputs], Tensor]:
    what = "0-d, this micro-batch's share of the loss. Sum over the tokens and divide by inputs.normalizers."

    def share(token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return tensor_from(aggregation, "algorithm.aggregation", aggregation(token_losses, inputs), (), what)

    return share


def _mismatch(mismatch: Mismatch) -> Callable[[Tensor, Sequences], Correction]:
    field, name = "algorithm.mismatch", type(mismatch).__qualname__

    def correction(log_weight: Tensor, sequences: Sequences) -> Correction:
        found = mismatch(log_weight, sequences)
        parts = found if isinstance(found, tuple) else ()
        kinds = [getattr(part, "dtype", type(part).__name__) for part in parts]
        if len(kinds) != 2 or kinds[1] != torch.bool:
            of = f" of {', '.join(map(str, kinds))}" if kinds else ""
            raise UserError(
                f"{field}: {name} returned {type(found).__name__}{of}: expected a Correction, the weight of each token and where "
                "it was changed, as bool."
            )
        for part, what in zip(found, ("weight", "changed")):
            tensor_from(mismatch, field, part, log_weight.shape, f"[T], the correction's {what} of each token.")
        return Correction(*found)

    return correction


def _reason(part: object, found: Any) -> str | None:
    """Returns a group filter's result. Raises UserError unless it is a text or None."""
    if found is None or (isinstance(found, str) and found):
        return found
    raise UserError(
        f"algorithm.group_filter: {type(part).__qualname__}.left_out returned {found!r:.80}: expected the reason as "
        "a text, or None to keep the group."
    )
