"""Forwards over a step's episodes without an update: another model's log-probabilities, the divergence from the teacher."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl.core import comm
from torchtitan_rl.core.algorithm.losses import DIVERGENCE, TEACHER_TOKEN
from torchtitan_rl.core.trainer.packing import completion_values
from torchtitan_rl.core.trainer.score import TokenScores, forget_forwards, score_only
from torchtitan_rl.core.types import Episode, FloatArray, Group, TrainBatch, flat

if TYPE_CHECKING:
    from torchtitan_rl.core.trainer.trainer import Trainer


class EpisodeScorer:
    """Scores whole steps. All methods are collective."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    def logprobs(self, model: Decoder, groups: Sequence[Group[Episode]]) -> list[FloatArray]:
        """Returns the log-probability that `model` gives each token of each episode's completion, [L].

        Every rank gets those of all episodes, in the groups' order. An episode without sampled tokens gets zeros.
        """
        trainer = self.trainer
        index = {id(episode): i for i, episode in enumerate(flat(groups))}
        mine: list[tuple[int, FloatArray]] = []
        share_from = trainer.batcher.share_prompts_from
        for batch in trainer.batcher.forward_only(groups):
            logprobs = score_only(
                model,
                batch.token_ids,
                batch.labels,
                batch.layout,
                trainer.temperature,
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

    @torch.no_grad()
    def mean_divergence(self, groups: Sequence[Group[Episode]]) -> float | None:
        """Returns the mean divergence from the teacher over sampled tokens; None if the loss reads none.

        The episodes of this rank's micro-batches keep the divergence of their tokens.
        """
        trainer = self.trainer
        if trainer.teacher is None:
            return None
        share_from = trainer.batcher.share_prompts_from
        total = count = 0.0
        for batch in trainer.batcher.forward_only(groups):
            scores = trainer.score(batch)  # [T] each
            keep_comparisons([batch], [comparison(scores).cpu()], share_from)
            total += float((scores.divergence * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
            forget_forwards(trainer.model)
        trainer.free_teacher()
        return trainer.sum(total) / max(trainer.sum(count), 1.0)


def comparison(scores: TokenScores) -> Tensor:
    """Returns divergence and teacher's token, [T] each, as one tensor for the way to the host: [2, T] float64."""
    divergence = scores.divergence.double()  # [T]
    teacher_token = scores.teacher_token.double()  # [T]
    return torch.stack([divergence, teacher_token])


def keep_comparisons(
    batches: Sequence[TrainBatch], comparisons: Sequence[Tensor], share_prompts_from: int
) -> None:
    """Give the batches' episodes their part of each `comparison` [2, T], which is on the host now."""
    for batch, values in zip(batches, comparisons, strict=True):
        for name, of_tokens in zip((DIVERGENCE, TEACHER_TOKEN), values, strict=True):
            found = completion_values(
                batch, of_tokens, share_prompts_from=share_prompts_from
            )  # [L] each
            for member, of_member in zip(batch.members, found, strict=True):
                member.episode.credit.token_columns[name] = of_member
