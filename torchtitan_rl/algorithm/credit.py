"""Which completion gets how much of the credit: scored completions to episodes with advantages and weights."""

import math

from torchtitan_rl.types import Episode, Prompt, ScoredCompletion

from .advantages import Advantage, all_equal
from .episodes import build_episodes, grouped
from .kl import KL
from .losses import PolicyLoss
from .nonfinite import episode_fault, raise_for_episode
from .seed_grpo import SeedGrpo
from .truncation import Truncation


class Credit:
    """The way from rewards to advantages.

    In this order: non-finite values, truncation, zero variance, KL in the reward, advantages (or a listwise loss's
    weights), semantic-entropy scale.
    """

    def __init__(
        self,
        *,
        advantage: Advantage,
        policy_loss: PolicyLoss,
        kl: KL,
        truncation: Truncation,
        seed_grpo: SeedGrpo | None,
        keep_zero_variance: bool,
        raise_nonfinite: bool,
    ) -> None:
        self.advantage = advantage
        self.policy_loss = policy_loss
        self.kl = kl
        self.truncation = truncation
        self.seed_grpo = seed_grpo
        self.keep_zero_variance = keep_zero_variance
        self.raise_nonfinite = raise_nonfinite

    def assign(
        self,
        prompts: list[Prompt],
        scored: list[ScoredCompletion],
        reference_logprobs: list[list[float]] | None,
        max_completion_tokens: int,
    ) -> list[Episode]:
        """The step's episodes, complete; see `Algorithm.make_episodes`."""
        episodes = build_episodes(prompts, scored, reference_logprobs)
        for episode in episodes:
            self._shape(episode, max_completion_tokens)
        groups = grouped(episodes)
        for group in groups:
            self._treat_zero_variance(group)
        if self.policy_loss.sets_advantages:
            for group in groups:
                self.policy_loss.weigh(group)
        else:
            self._set_advantages(groups)
        for episode in episodes:
            if not math.isfinite(episode.advantage):
                self._leave_out(episode, f"the advantage is {episode.advantage}")
        return episodes

    def _shape(self, episode: Episode, max_completion_tokens: int) -> None:
        fault = episode_fault(episode)
        if fault is not None:
            self._leave_out(episode, fault)
        elif episode.reward is None:
            episode.in_loss = False
        else:
            penalty = self.truncation.penalty(len(episode.token_ids), max_completion_tokens)
            episode.shaped_reward = episode.reward + penalty
        if not episode.token_ids or self.truncation.masks(episode.finish_reason):
            episode.in_loss = False

    def _leave_out(self, episode: Episode, fault: str) -> None:
        if self.raise_nonfinite:
            raise_for_episode(episode, fault)
        episode.shaped_reward = None
        episode.advantage = 0.0
        episode.weight = 0.0
        episode.in_loss = False

    def _treat_zero_variance(self, group: list[Episode]) -> None:
        # Dropping looks at what the grader said, as DAPO's filter does: a length penalty must not save such a group.
        if not self.keep_zero_variance and not has_preference(group):
            for episode in group:
                episode.in_loss = False
        shaped = [episode for episode in group if episode.shaped_reward is not None]
        if all_equal([episode.shaped_reward for episode in shaped]):
            for episode in group:
                episode.weight = 0.0
        elif self.kl.in_reward:
            for episode in shaped:
                episode.shaped_reward -= self.kl.penalty(episode.sampler_logprobs, episode.reference_logprobs)

    def _set_advantages(self, groups: list[list[Episode]]) -> None:
        advantages = self.advantage([[episode.shaped_reward for episode in group] for group in groups])
        for group, values in zip(groups, advantages, strict=True):
            scale = 1.0 if self.seed_grpo is None else self.seed_grpo.scale(group)
            for episode, value in zip(group, values, strict=True):
                episode.advantage = scale * value


def has_preference(group: list[Episode] | list[ScoredCompletion]) -> bool:
    """Whether a group's rewards differ, before any penalty; rewards that are None, NaN or infinite take no part."""
    return not all_equal([one.reward for one in group if one.reward is not None and math.isfinite(one.reward)])
