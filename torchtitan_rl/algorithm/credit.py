"""`CreditAssignment`: how a step's rewards become credit. Which episodes are in the loss, and with which advantages?"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torchtitan_rl.algorithm.episodes import differ, turn_returns
from torchtitan_rl.algorithm.losses.loss import REFERENCE_LOGPROBS, Loss
from torchtitan_rl.algorithm.nonfinite import episode_fault, leave_out
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode, Group, Member, ScoredCompletion

ZERO_VARIANCE = "zero variance"
"""`Credit.left_out` of a group whose rewards are all equal."""


class GroupFilter(OwnConfig, ABC):
    """Leaves whole groups out of the loss. With `algorithm.zero_variance` "refill" new prompts replace them."""

    @abstractmethod
    def left_out(self, group: Group[ScoredCompletion]) -> str | None:
        """Why the group is left out, in a few words such as "too easy"; None if it is not.

        It depends on the group alone, because it is asked several times in a step, on every rank.
        """


class CreditAssignment:
    """Sets the credit of a step's episodes, once all groups are on every rank. Nothing communicates."""

    def __init__(self, config: OwnConfig.Config, loss: Loss, max_completion_tokens: int) -> None:
        """`config`: the objective's, an `Algorithm.Config`."""
        self.loss = loss
        self.max_completion_tokens = max_completion_tokens
        self.kl = config.kl.build()
        self.needs_reference = config.kl.coef > 0 or REFERENCE_LOGPROBS in loss.reads
        """Whether a frozen reference model must be loaded and score every episode."""
        self.advantage = config.advantage.build()
        self.truncation = config.truncation.build()
        self.seed_grpo = None if config.seed_grpo is None else config.seed_grpo.build()
        self.group_filter = None if config.group_filter is None else config.group_filter.build()
        self.by_turn = config.credit == "turn"
        self.leaves_out_equal = config.zero_variance != "keep"
        self.raises = config.nonfinite == "raise"

    def assign(self, groups: list[Group[Episode]]) -> None:
        """Set the credit of the step's episodes.

        For each episode: non-finite values, the reward with the penalties of truncation and KL, and why it is left out. Then groups
        that are left out, advantages with the semantic-entropy scale, what the loss adds, and advantages that overflow.

        Args:
            groups: all groups of the step, because advantages may depend on all of them. With `needs_reference` each
                episode has the reference's log-probabilities.

        Raises:
            ValueError: an episode lacks the reference's log-probabilities.
            NonFiniteError: with nonfinite "raise", naming prompt, sample and function.
        """
        for group in groups:
            for episode in group.samples:
                self._screen(Member(group.prompt, episode))
            scored = [episode.scored for episode in group.samples]
            reason = self.group_left_out(Group(prompt=group.prompt, samples=scored))
            for episode in group.samples:
                if reason and episode.in_loss:
                    episode.credit.left_out = reason
        if self.loss.learns_from == "advantages":
            self._set_advantages(groups)
        self.loss.assign_credit(groups)
        for group in groups:
            for episode in group.samples:
                if not math.isfinite(episode.credit.advantage):
                    text = f"the advantage is {episode.credit.advantage}"
                    member = Member(group.prompt, episode)
                    leave_out(member, "advantage", text, raises=self.raises)

    def _screen(self, member: Member) -> None:
        """Set the episode's shaped reward, and why it is left out of the loss, if it is."""
        episode = member.episode
        credit = episode.credit
        if self.needs_reference and episode.reference_logprobs is None:
            raise ValueError(
                f"{member.name}: reference_logprobs = None: expected one for each token, because algorithm.kl.coef > 0 "
                "or the loss uses the reference (Algorithm.needs_reference). Score the groups with "
                "trainer.teachers.frozen_models.Reference first."
            )
        if fault := episode_fault(episode):
            leave_out(member, *fault, raises=self.raises)
            return
        if episode.reward is not None:
            credit.shaped_reward = self._shaped_reward(member)
        if episode.reward is None and self.loss.uses_rewards:
            credit.left_out = "no reward"
        elif episode.completion.num_sampled == 0:
            credit.left_out = "no tokens"
        elif self.truncation.masks(episode.completion):
            credit.left_out = "truncated"

    def _shaped_reward(self, member: Member) -> float:
        episode = member.episode
        sampling = member.prompt.sampling  # None: the run's
        longest = self.max_completion_tokens if sampling is None else sampling.max_tokens
        penalty = self.truncation.penalty(episode.completion.num_sampled, longest)
        penalty += self.truncation.cut_reward(episode.completion)
        shaped = episode.reward + penalty
        if self.kl.in_reward:
            shaped -= self.kl.penalty(episode)
        return shaped

    def group_left_out(self, group: Group[ScoredCompletion]) -> str | None:
        """Why the whole group is left out of the loss: "zero variance", or the filter's reason; None if it is not.

        As in DAPO's filter, the grader's rewards decide: a length penalty does not save a group from being dropped.
        """
        if self.leaves_out_equal and not self.rewards_differ(group.samples):
            return ZERO_VARIANCE
        return None if self.group_filter is None else self.group_filter.left_out(group) or None

    def rewards_differ(self, samples: Sequence[ScoredCompletion]) -> bool:
        """Whether a group's rewards, before any penalty, differ: those of the whole, or with `credit` "turn" of any
        turn."""
        return differ([self._returns(scored, scored.reward) for scored in samples])

    def _set_advantages(self, groups: list[Group[Episode]]) -> None:
        """Set the advantage of every episode, and with `credit` "turn" of every turn.

        The k-th returns of a group share a baseline; without turns there is one return, the shaped reward. If only one
        sample has a k-th return, there is nothing to compare it with and its advantage is 0.
        """
        # [group][sample][turn], also of samples and groups that are left out
        returns: list[list[list[float | None]]] = []
        for group in groups:
            returns.append([self._returns(e.scored, e.credit.shaped_reward) for e in group.samples])
        num_turns = max((len(sample) for group in returns for sample in group), default=0)
        advantages: list[list[list[float]]] = []  # [turn][group][sample]
        for k in range(num_turns):
            kth: list[list[float | None]] = []  # [group][sample]
            for group_returns in returns:
                kth.append([turns[k] if k < len(turns) else None for turns in group_returns])
            advantages.append(self.advantage.of_step(kth, groups))
        for g, group in enumerate(groups):
            scale = 1.0 if self.seed_grpo is None else self.seed_grpo.scale(group)
            for i, episode in enumerate(group.samples):
                turns = range(len(returns[g][i]))
                _set_turn_advantages(episode, [scale * float(advantages[k][g][i]) for k in turns])

    def _returns(self, scored: ScoredCompletion, total: float | None) -> list[float | None]:
        """The rewards that get an advantage: `total` alone, or with `credit` "turn" one for each turn."""
        return turn_returns(scored, total) if self.by_turn else [total]


def _set_turn_advantages(episode: Episode, advantages: list[float]) -> None:
    """Set the advantages of an episode's turns, and their mean over its tokens."""
    credit = episode.credit
    credit.advantage = advantages[0]
    if len(advantages) > 1:
        credit.turn_advantages = tuple(advantages)
        lengths = [turn.num_tokens for turn in episode.completion.turns]
        weighted = sum(value * n for value, n in zip(advantages, lengths, strict=True))
        credit.advantage = weighted / max(sum(lengths), 1)
