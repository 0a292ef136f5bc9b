"""Forwards over a step's episodes without an update: `Source`s of log-probabilities, and measures of held-out episodes."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS, LOGPROBS
from torchtitan_rl.algorithm.losses.sft import HELD_OUT_LOSS
from torchtitan_rl.models.score import Companion
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import (
    Episode,
    EvaluationPass,
    Group,
    Prompt,
    ScoredCompletion,
    flat,
)


class Reference:
    """The start of the policy, a `Source`. With LoRA it is the policy's base, which takes no second copy."""

    name = "reference"

    def __init__(self, trainer: Trainer) -> None:
        """Load the start's weights once more, unless the policy has adapters. Collective."""
        self.trainer = trainer
        self.model = trainer.model
        if trainer.lora is None:
            self.model = trainer.loader.policy().requires_grad_(False)

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set every episode's `reference_logprobs` to log pi_ref of its tokens, [L], on every rank. Collective."""
        lora = self.trainer.lora
        with lora.off(self.model) if lora else nullcontext():
            logprobs = self.trainer.episode_logprobs(self.model, groups)
        for episode, values in zip(flat(groups), logprobs, strict=True):
            episode.reference_logprobs = values


class PolicyAverage:
    """An average of the policy over the steps, a `Source`: theta' <- theta' + rate (theta - theta'). It moves once a step,
    before it is asked for log-probabilities. With LoRA theta is A and B."""

    name = "teacher_average"

    def __init__(self, trainer: Trainer, rate: float) -> None:
        """Load the start's weights once more; adapters begin as the policy's. Collective."""
        self.rate = rate
        self.model = trainer.loader.policy().requires_grad_(False)
        named = zip(self.model.named_parameters(), trainer.model.parameters(), strict=True)
        self._pairs = {canonical_fqn(name): (own, p) for (name, own), p in named if p.requires_grad}
        with torch.no_grad():
            for own, policy in self._pairs.values():
                own.copy_(policy)

    @torch.no_grad()
    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Move towards the policy. The episodes are not read."""
        for own, policy in self._pairs.values():
            own.lerp_(policy, self.rate)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name: the sharded tensors themselves."""
        return {f"{self.name}.{name}": own.detach() for name, (own, _) in self._pairs.items()}


@dataclass(eq=False)
class Collisions:
    """The policy itself, a `Source` of what `OptimalBaseline` reads: each token's probability, and that two samples of it are equal.

    At half the temperature the policy is pi'(v) = pi(v)^2 / sum_u pi(u)^2, so log sum_u pi(u)^2 = 2 log pi(v) - log pi'(v) for any token v:
    two forwards, and nothing of [T, V].
    """

    trainer: Trainer
    name = "optimal_baseline"

    def add_logprobs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set the two token columns of every episode, [L] each. Collective."""
        trainer = self.trainer
        plain = trainer.episode_logprobs(trainer.model, groups)  # [L] each
        sharp = trainer.episode_logprobs(
            trainer.model, groups, temperature=trainer.temperature / 2
        )  # [L] each
        for episode, of_plain, of_sharp in zip(flat(groups), plain, sharp, strict=True):
            episode.credit.token_columns |= {
                LOGPROBS: of_plain,
                LOG_COLLISIONS: 2 * of_plain - of_sharp,
            }


def held_out_measures(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    sampled: Mapping[EvaluationPass, Sequence[Group[Episode]]],
    teacher: Companion | None = None,
) -> dict[str, float]:
    """Returns what is measured of held-out prompts beside their samples: the mean -log pi of their demonstrations' tokens
    to learn, and what a teacher says of each pass's samples. Collective."""
    measured: dict[str, float] = {}
    shown: list[Group[Episode]] = []
    for prompt in prompts:
        if prompt.demonstration is not None:
            scored = ScoredCompletion(completion=prompt.demonstration, reward=None)
            shown.append(Group(prompt=prompt, samples=[Episode(scored=scored)]))
    if shown:
        logprobs = trainer.episode_logprobs(trainer.model, shown)  # [L] each
        masks = [group.prompt.demonstration.loss_mask for group in shown]  # [L] each
        losses = -np.concatenate(logprobs)[np.concatenate(masks)]  # [tokens to learn of all]
        measured[HELD_OUT_LOSS] = float(losses.mean(dtype=np.float64))
    if teacher:
        for evaluation_pass, groups in sampled.items():
            for name, value in teacher.measure(groups).items():
                measured[f"{evaluation_pass.prefix}/{name}"] = value
    return measured
