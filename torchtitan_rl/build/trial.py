"""Calls the parts of the objective once on a synthetic step, so that a fault in a user's loss is named before the engine starts."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.config import Configurable

from torchtitan_rl.algorithm import Aggregation, Algorithm, LossInputs, TokenLoss
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.algorithm.losses.distillation import DIVERGENCE
from torchtitan_rl.algorithm.nonfinite import NonFiniteError
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.references import correctable, is_users_class
from torchtitan_rl.observe.sample_rows import TRAINED_SPLIT, episode_rows
from torchtitan_rl.trainer.packing import pack
from torchtitan_rl.types import (
    Completion,
    Episode,
    Group,
    Member,
    Metric,
    Prompt,
    ScoredCompletion,
    TurnRecord,
    flat,
)

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig

MOST_SAMPLES = 16
"""Completions of a synthetic group, or `sampling.n` if that is less."""


def try_objective(config: "RunConfig", prompt: Prompt, reward_names: Sequence[str]) -> None:
    """Credit and differentiate two synthetic groups of a real prompt, with different rewards.

    Raises:
        UserError: naming the part that returns a wrong shape or number, or no gradient; or the line that raises.
    """
    algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    groups = [_group(replace(prompt, prompt_idx=index), config, reward_names) for index in range(2)]
    held = (*vars(algorithm).values(), *vars(algorithm.credit).values())
    parts = dict.fromkeys(type(part) for part in held if isinstance(part, Configurable))
    own = ", ".join(part.__qualname__ for part in parts if is_users_class(part))
    with correctable(
        f"algorithm: on a synthetic step of two groups {own or type(algorithm).__qualname__} raised"
    ):
        _train(algorithm, draft_episodes(groups))


def _with_frozen_models(algorithm: Algorithm, groups: list[Group[Episode]]) -> None:
    """Set what the reference and the other sources say of the episodes."""
    for episode in flat(groups) if algorithm.needs_reference else []:
        episode.reference_logprobs = episode.completion.sampler_logprobs - np.float32(0.1)  # [L]
    for name in algorithm.policy_loss.source_columns:
        for episode in flat(groups):
            episode.credit.token_columns[name] = episode.completion.sampler_logprobs - np.float32(
                0.1
            )  # [L]


def _train(algorithm: Algorithm, groups: list[Group[Episode]]) -> None:
    _with_frozen_models(algorithm, groups)
    _assign_credit(algorithm, groups)
    episode_rows(
        groups, step=1, split=TRAINED_SPLIT, policy_step=0
    )  # raises for a column of the tables' own
    members = [
        Member(group.prompt, episode)
        for group in groups
        for episode in group.samples
        if episode.in_loss
    ]
    for member in members:
        algorithm.policy_loss.zero_gradient(member.episode)
    batch = pack(
        members,
        normalizers=algorithm.normalizers(groups),
        multiple=8,
        sequence_columns=algorithm.policy_loss.sequence_columns,
        token_columns=algorithm.policy_loss.token_columns,
    )
    logprobs = (batch.sampler_logprobs - 0.01).requires_grad_()  # [T]
    if algorithm.policy_loss.divergence_beta is not None:
        batch.token_columns[DIVERGENCE] = -logprobs  # [T]
    _check_shapes_in(algorithm)
    output = algorithm.loss(batch, logprobs, -logprobs)
    output.loss.backward()
    _ = output.metrics
    finite = {"loss": output.loss, "gradient": logprobs.grad}
    for what in [
        what for what, value in finite.items() if members and not torch.isfinite(value).all()
    ]:
        raise UserError(
            f"algorithm.loss: the {what} of {type(algorithm.policy_loss).__qualname__} is NaN or infinite on a synthetic step "
            "whose rewards, advantages and log-probabilities are finite. Look for a division by 0 or a logarithm of 0."
        )
    _check_metrics(algorithm, "group_metrics", algorithm.policy_loss.group_metrics(groups))
    algorithm.group_metrics(groups)
    _check_metrics(
        algorithm,
        "after_update",
        algorithm.after_update(dict.fromkeys(algorithm.controller_inputs, 1.0)),
    )
    json.dumps(algorithm.policy_loss.state_dict())


def _assign_credit(algorithm: Algorithm, groups: list[Group[Episode]]) -> None:
    """Set the credit. Raises UserError if an advantage is not finite, which a step would put down to the rewards."""
    name = type(algorithm.credit.advantage).__qualname__
    cause = f"algorithm.advantage: {name} gives NaN or infinite advantages on a synthetic step whose rewards are finite"
    try:
        algorithm.credit.assign(groups)
    except NonFiniteError as error:
        raise UserError(
            f"{cause}: {str(error).partition(', because')[0]}. Look for a division by 0."
        ) from error
    masked = [
        episode
        for episode in flat(groups)
        if (episode.credit.left_out or "").startswith("not finite")
    ]
    if masked:
        raise UserError(
            f"{cause}: {masked[0].credit.left_out.partition(', because')[0]}. Look for a division by 0."
        )


def _check_metrics(algorithm: Algorithm, method: str, returned: dict[str, Metric]) -> None:
    name, expected = (
        f"{type(algorithm.policy_loss).__qualname__}.{method}",
        "a dict with a Metric by each name",
    )
    for metric in returned.values():
        if not isinstance(metric, Metric):
            raise UserError(
                f"algorithm.loss: {name} returned {metric!r:.80}: expected {expected}. Return one."
            )


def _check_shapes_in(algorithm: Algorithm) -> None:
    """Let the next call of the loss raise UserError for a result of another shape, which would be broadcast in silence."""
    loss, terms = algorithm.policy_loss, algorithm.policy_loss.terms

    def checked(inputs: LossInputs, aggregation: Aggregation) -> dict[str, Tensor]:
        _check_shapes(algorithm, inputs)
        found = terms(inputs, aggregation)
        if not found["policy"].requires_grad:
            raise UserError(
                f"algorithm.loss: {type(loss).__qualname__} returned a loss without a gradient, so nothing would be learned. Compute "
                "it from inputs.logprobs or inputs.log_ratio, without detach(), item(), numpy() or torch.no_grad()."
            )
        return found

    loss.terms = checked


def _check_shapes(algorithm: Algorithm, inputs: LossInputs) -> None:
    """Raise UserError, naming the class, for a correction, loss, ratio or clipping that is not one value for each token, or for
    each sequence if the loss is one of sequences."""
    loss, tokens = algorithm.policy_loss, inputs.mask.shape
    results: list[tuple[str, Any, Any, tuple[int, ...]]] = [
        ("mismatch", algorithm.mismatch, inputs.correction, tokens)
    ]
    if isinstance(loss, TokenLoss):
        results.append(("loss", loss, loss(inputs), tokens))
        of_ratio = loss.ratio_loss
        if of_ratio is not None:
            ratio = of_ratio.ratio(inputs)  # [T]
            values = (ratio, *of_ratio.clipped(inputs, ratio).values())
            results += [("loss", of_ratio, value, tokens) for value in values]
    elif callable(loss):
        results.append(("loss", loss, loss(inputs), (inputs.sequences.num,)))
    for field, part, value, shape in results:
        is_mask = (
            part is algorithm.mismatch and isinstance(value, Tensor) and value.dtype == torch.bool
        )
        if is_mask or not isinstance(value, Tensor) or value.shape != shape:
            found = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            found += ", a mask in the place of the weight" * is_mask
            raise UserError(
                f"algorithm.{field}: {type(part).__qualname__} returned {found}: expected a tensor of shape {list(shape)}, a value "
                f"for each packed {'token' if shape == tokens else 'sequence'}. Leave sums and means to algorithm.aggregation."
            )


def _group(
    prompt: Prompt, config: "RunConfig", reward_names: Sequence[str]
) -> Group[ScoredCompletion]:
    n = min(config.sampling.n, MOST_SAMPLES)
    by_turns = config.algorithm.credit == "turn"
    return Group(
        prompt=prompt, samples=[_scored(prompt, i, i / n, reward_names, by_turns) for i in range(n)]
    )


def _scored(
    prompt: Prompt, sample_idx: int, reward: float, reward_names: Sequence[str], by_turns: bool
) -> ScoredCompletion:
    """A completion of one or two tokens, or with `by_turns` of as many turns."""
    length = 1 + sample_idx % 2
    turns = (
        tuple(TurnRecord(text="turn", num_tokens=1, reward=reward / length) for _ in range(length))
        * by_turns
    )
    completion = Completion(
        sample_idx=sample_idx,
        policy_version=0,
        token_ids=[int(prompt.token_ids[-1])] * length,
        sampler_logprobs=[-0.5 - sample_idx / 64] * length,
        text="synthetic",
        finish_reason="stop",
        turns=turns,
    )
    return ScoredCompletion(
        completion=completion,
        reward=reward,
        reward_breakdown=dict.fromkeys(reward_names, reward),
        extra=defaultdict(float),  # whatever a reward function logs, a part may read
        answer=prompt.expected_answer,
        correct=sample_idx % 2 == 1,
        turn_rewards=tuple(turn.reward for turn in turns),
    )
