"""Forwards over a step's episodes without an update: another model's log-probabilities, a teacher's measures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.core import comm
from torchtitan_rl.core.evaluation import HELD_OUT_LOSS
from torchtitan_rl.core.trainer.packing import completion_values
from torchtitan_rl.core.trainer.score import (
    score_only,
)
from torchtitan_rl.core.types import (
    Episode,
    EvaluationPass,
    FloatArray,
    Group,
    Prompt,
    ScoredCompletion,
    flat,
)

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.trainer import Trainer


def episode_logprobs(
    trainer: "Trainer",
    model: Decoder,
    groups: Sequence[Group[Episode]],
    *,
    temperature: float | None = None,
) -> list[FloatArray]:
    """Returns the log-probability that `model` gives each token of each episode's completion, [L].

    At the sampling temperature unless another is given. Collective. Every rank gets those of all episodes, in the groups' order. An episode without sampled tokens gets zeros.
    """
    index = {id(episode): i for i, episode in enumerate(flat(groups))}
    mine: list[tuple[int, FloatArray]] = []
    share_from = trainer.batcher.share_prompts_from
    for batch in trainer.batcher.forward_only(groups):
        logprobs = score_only(
            model,
            batch.token_ids,
            batch.labels,
            batch.layout,
            temperature or trainer.temperature,
            batch.loss_positions,
        )  # [T]
        found = completion_values(batch, logprobs, share_prompts_from=share_from)  # [L] each
        for member, values in zip(batch.members, found, strict=True):
            mine.append((index[id(member.episode)], values))
    # [L] each
    scored = [np.zeros_like(episode.completion.sampler_logprobs) for episode in flat(groups)]
    for i, logprobs in comm.all_gather_lists(mine if trainer.is_tp_leader else []):
        scored[i] = logprobs
    return scored


def held_out_loss(trainer: "Trainer", prompts: Sequence[Prompt]) -> dict[str, float]:
    """Returns the mean -log pi of the demonstrations' tokens to learn; nothing without demonstrations. Collective."""
    groups: list[Group[Episode]] = []
    for prompt in prompts:
        if prompt.demonstration is not None:
            scored = ScoredCompletion(completion=prompt.demonstration, reward=None)
            groups.append(Group(prompt=prompt, samples=[Episode(scored=scored)]))
    if not groups:
        return {}
    scored = episode_logprobs(trainer, trainer.model, groups)  # [L] each
    learned: list[FloatArray] = []
    for group, logprobs in zip(groups, scored, strict=True):
        learned.append(logprobs[group.prompt.demonstration.loss_mask])  # [tokens to learn]
    losses = -np.concatenate(learned)  # [tokens to learn of all]
    return {HELD_OUT_LOSS: float(losses.mean(dtype=np.float64))}


def held_out_teacher(
    trainer: "Trainer", sampled: Mapping[EvaluationPass, Sequence[Group[Episode]]]
) -> dict[str, float]:
    """Returns what the trainer's teacher measures of each pass's samples; nothing without one. Collective."""
    measured: dict[str, float] = {}
    for evaluation_pass, groups in sampled.items() if trainer.teacher else ():
        for name, value in trainer.teacher.measure(groups).items():
            measured[f"{evaluation_pass.prefix}/{name}"] = value
    return measured
