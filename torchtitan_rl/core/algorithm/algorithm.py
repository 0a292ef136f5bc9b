"""`Algorithm`: one objective, composed from small pieces, as the controller and the trainer call it."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan_rl.core.algorithm.advantages import Advantage, Grpo, all_equal
from torchtitan_rl.core.algorithm.aggregations import Aggregation, TokenMean
from torchtitan_rl.core.algorithm.credit import set_advantage, turn_returns, whole_returns
from torchtitan_rl.core.algorithm.episodes import count_normalizers, has_preference
from torchtitan_rl.core.algorithm.groups import GroupScale
from torchtitan_rl.core.algorithm.inputs import LossInputs, Sequences
from torchtitan_rl.core.algorithm.kl import KL
from torchtitan_rl.core.algorithm.loss_metrics import (
    Tally,
    record_divergence,
    record_losses,
    record_ratio,
    record_sampler,
)
from torchtitan_rl.core.algorithm.losses import Clip, ListwiseLoss, Loss
from torchtitan_rl.core.algorithm.mismatch import Mismatch, NoCorrection
from torchtitan_rl.core.algorithm.nonfinite import episode_fault, finite_tokens, leave_out, quantities, raise_for_token
from torchtitan_rl.core.algorithm.truncation import Truncation
from torchtitan_rl.core.config import OwnConfig, check_fields, number
from torchtitan_rl.core.errors import expect
from torchtitan_rl.core.types import Episode, Group, Member, Metric, Normalizers, ScoredCompletion, TrainBatch


class LossOutput(NamedTuple):
    """What `Algorithm.loss` returns for one micro-batch."""

    loss: Tensor
    """0-d, this micro-batch's share: shares of all micro-batches and data-parallel ranks sum to the step's loss."""
    metrics: dict[str, Metric]
    """On the host: floats, and a float tensor [at most 4096] where the reduction is "distribution"."""


class Algorithm(OwnConfig):
    """The objective of a run: rewards to advantages, log-probabilities to a loss, merged statistics to controllers.

    Everything is a pure function of its arguments, except for controllers, whose state `state_dict` returns. Nothing
    here communicates: groups are the same on every rank, and `loss` divides by counts of the whole update.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        advantage: Advantage.Config = field(default_factory=Grpo.Config)
        """How a group's rewards become advantages: GroupMean, Grpo, BatchStd or Rloo."""
        loss: Loss.Config = field(default_factory=Clip.Config)
        """The policy loss: Clip, Gspo, Cispo, Reinforce or MaxEnt."""
        credit: Literal["episode", "turn"] = "episode"
        """What an advantage is of: the whole completion, or each turn of a conversation by what was earned from it on."""
        aggregation: Aggregation.Config = field(default_factory=TokenMean.Config)
        """How token losses become one number: TokenMean, SeqMeanTokenMean or SeqSumConst."""
        mismatch: Mismatch.Config = field(default_factory=NoCorrection.Config)
        """Correction for sampler and trainer computing different log-probabilities."""
        kl: KL.Config = field(default_factory=KL.Config)
        """The term that holds the policy near a frozen reference; off by default."""
        entropy_coef: float = number(0.0, least=0)
        """Weight of the entropy bonus, token-weighted; 0 for none."""
        truncation: Truncation.Config = field(default_factory=Truncation.Config)
        """What to do with completions that were cut: by the length limit, or by a conversation's."""
        zero_variance: Literal["keep", "drop", "refill"] = "keep"
        """Groups whose rewards are all equal: keep them in the normalisers with advantage 0, drop them before the
        forward, or replace them by groups of fresh prompts (what is still of zero variance after that is dropped)."""
        refill_rounds: int = number(1, least=1)
        """Most rounds of fresh prompts a step, with zero_variance "refill"."""
        seed_grpo: GroupScale.Config | None = None
        """Scale advantages down by the group's semantic entropy; None for off."""
        old_logprobs: Literal["policy", "sampler"] = "policy"
        """Denominator of the ratio: the trainer's own log-probabilities before the first update, or the sampler's."""
        nonfinite: Literal["raise", "mask"] = "raise"
        """NaN or infinite rewards, advantages and log-probabilities: an error that names the prompt, the sample and the
        function, or left out of the loss and counted."""

        def __post_init__(self) -> None:
            check_fields(self, "algorithm")
            expect(
                self.old_logprobs == "policy" or isinstance(self.mismatch, NoCorrection.Config),
                "algorithm.mismatch", self.mismatch, 'no correction with old_logprobs "sampler"',
                'The ratio is then already against the sampler; use old_logprobs "policy" to correct separately.',
            )  # fmt: skip
            if isinstance(self.loss, ListwiseLoss.Config):
                self._check_listwise()

        def _check_listwise(self) -> None:
            """What would have no effect beside a listwise loss."""
            corrects = not isinstance(self.mismatch, NoCorrection.Config)
            for name, wrong, expected, remedy in (
                ("kl.coef", self.kl.coef != 0, "0", "MaxEnt's reference term is algorithm.loss.beta."),
                ("credit", self.credit != "episode", "episode", "Its weights are of whole completions."),
                ("seed_grpo", self.seed_grpo is not None, "None", "It scales advantages, which a listwise loss sets."),
                ("advantage", type(self.advantage) is not Grpo.Config, "the default", "It has its own; leave the field out."),
                ("mismatch", corrects and getattr(self.loss, "clip_coef", 0) == 0, "no correction",
                 "A token weight has no place in a softmax over sequences; it needs the clip loss (clip_coef > 0)."),
            ):  # fmt: skip
                value = attrgetter(name)(self)
                expect(not wrong, f"algorithm.{name}", value, f"{expected} with a listwise loss", remedy)

    def __init__(self, config: Config, *, max_completion_tokens: int) -> None:
        """
        Args:
            max_completion_tokens: the longest completion that is sampled for training.
        """
        super().__init__(config)
        self.max_completion_tokens = max_completion_tokens
        self.policy_loss = config.loss.build()
        self.listwise = self.policy_loss if isinstance(self.policy_loss, ListwiseLoss) else None
        self.token_loss = self.listwise.token_loss if self.listwise else self.policy_loss
        self.advantage = config.advantage.build()
        self.aggregation = config.aggregation.build()
        self.mismatch = config.mismatch.build()
        self.kl = config.kl.build()
        self.truncation = config.truncation.build()
        self.seed_grpo = None if config.seed_grpo is None else config.seed_grpo.build()
        self.raises = config.nonfinite == "raise"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference model must be loaded, and every episode needs its log-probabilities."""
        return self.config.kl.coef > 0 or self.policy_loss.needs_reference

    @property
    def requires_whole_groups(self) -> bool:
        """Whether the packer must keep a prompt's group in one micro-batch."""
        return self.listwise is not None

    @property
    def refill_rounds(self) -> int:
        """Rounds of fresh prompts a step may ask for, to replace groups that teach nothing."""
        return self.config.refill_rounds if self.config.zero_variance == "refill" else 0

    @property
    def controller_inputs(self) -> tuple[str, ...]:
        """Keys of the step's globally merged metrics that `after_update` reads; empty without controllers."""
        return self.policy_loss.controller_inputs

    def validate_sampling(self, n: int) -> None:
        """Raise UserError for n completions a prompt, or a longest completion, that the objective cannot work with."""
        expect(
            n >= 2, "sampling.n", n, "at least 2 completions a prompt, for the baseline is the group's own",
            "Use 4 or more; 8 and 16 are common.",
        )  # fmt: skip
        self.truncation.validate_length(self.max_completion_tokens)
        self.policy_loss.validate_group_size(n)

    def usable_groups(self, groups: list[Group[ScoredCompletion]]) -> list[bool]:
        """Whether each group's rewards differ, before any penalty: False is what `zero_variance` drops or refills."""
        return [has_preference(group) for group in groups]

    def assign_credit(self, groups: list[Group[Episode]]) -> None:
        """Fill in `shaped_reward`, `advantage`, `mass`, `anchored` and `left_out` of the step's episodes.

        In this order: non-finite values, truncation, zero variance, KL in the reward, advantages (or a listwise loss's
        weights), semantic-entropy scale.

        Args:
            groups: the whole step's, for advantages may depend on all of it, with the reference's log-probabilities
                where `needs_reference`.

        Raises:
            ValueError: an episode without the reference's log-probabilities.
            NonFiniteError: with nonfinite "raise", naming prompt, sample and function.
        """
        for group in groups:
            for episode in group.samples:
                self._shape(Member(group.prompt, episode))
            self._treat_zero_variance(group)
        if self.listwise is not None:
            self._weigh(groups)
        else:
            self._set_advantages(groups)
        for group in groups:
            for episode in group.samples:
                if not math.isfinite(episode.credit.advantage):
                    fault = f"the advantage is {episode.credit.advantage}, for the rewards overflow"
                    leave_out(Member(group.prompt, episode), fault, raises=self.raises)

    def _shape(self, member: Member) -> None:
        episode, completion = member.episode, member.episode.completion
        if self.needs_reference and episode.reference_logprobs is None:
            raise ValueError(
                f"{member.name}: reference_logprobs = None: expected one for each token, because algorithm.kl.coef > 0 "
                "or the loss weighs by the reference (Algorithm.needs_reference). Score the reference before."
            )
        if (fault := episode_fault(episode)) is not None:
            return leave_out(member, fault, raises=self.raises)
        if episode.reward is None:
            episode.credit.left_out = "no reward"
            return None
        penalty = self.truncation.penalty(completion.num_sampled, self.max_completion_tokens)
        penalty += self.truncation.cut_reward(completion)
        episode.credit.shaped_reward = episode.reward + penalty
        if completion.num_sampled == 0:
            episode.credit.left_out = "no tokens"
        elif self.truncation.masks(completion):
            episode.credit.left_out = "truncated"
        return None

    def _treat_zero_variance(self, group: Group[Episode]) -> None:
        # Dropping looks at what the grader said, as DAPO's filter does: a length penalty must not save such a group.
        if self.config.zero_variance != "keep" and not has_preference(group):
            for episode in group.samples:
                episode.credit.left_out = episode.credit.left_out or "zero variance"
        shaped = [episode for episode in group.samples if episode.credit.shaped_reward is not None]
        if all_equal([episode.credit.shaped_reward for episode in shaped]):
            for episode in group.samples:
                episode.credit.anchored = False
        elif self.kl.in_reward:
            for episode in shaped:
                episode.credit.shaped_reward -= self.kl.penalty(episode)

    def _weigh(self, groups: list[Group[Episode]]) -> None:
        for group in groups:
            for episode in group.samples:
                episode.credit.mass = episode.credit.q_mass = 0.0
            members = [episode for episode in group.samples if episode.in_loss]
            if members:
                self.listwise.weigh(members)

    def _set_advantages(self, groups: list[Group[Episode]]) -> None:
        returns = turn_returns if self.config.credit == "turn" else whole_returns
        advantages = self.advantage.of_turns([[returns(episode) for episode in group.samples] for group in groups])
        for group, values in zip(groups, advantages, strict=True):
            scale = 1.0 if self.seed_grpo is None else self.seed_grpo.scale(group)
            for episode, of_turns in zip(group.samples, values, strict=True):
                set_advantage(episode, [scale * value for value in of_turns])

    def is_silent(self, episode: Episode) -> bool:
        """Whether nothing in the objective has a gradient at this episode, once credit is assigned: it needs no backward."""
        anchored = self.kl.in_loss and episode.credit.anchored
        quiet = self.listwise is None and self.policy_loss.silent_without_advantage and self.config.entropy_coef == 0
        advantages = episode.credit.turn_advantages or (
            episode.credit.advantage,
        )  # those of turns may cancel out in the mean
        return quiet and not anchored and not any(advantages)

    def normalizers(self, groups: list[Group[Episode]]) -> Normalizers:
        """What the losses of one update over `groups` divide by."""
        return count_normalizers(groups, self.max_completion_tokens)

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """What only the objective knows of the step's groups; the same on every rank."""
        return self.policy_loss.group_metrics(groups) | (self.seed_grpo.metrics(groups) if self.seed_grpo else {})

    def loss(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        """The loss of one packed micro-batch.

        Args:
            batch: T tokens, S sequences.
            logprobs: [T] log pi of `batch.labels`, with gradient; anything outside the loss mask.
            entropy: [T] H(pi) at each position, in nats, with gradient if `entropy_coef` > 0.

        Returns:
            The share of the step's loss, connected to `logprobs` even when no token takes part (then 0 with zero
            gradient, so that every rank runs its backward), and the micro-batch's metrics.

        Raises:
            NonFiniteError: with nonfinite "raise", naming prompt, sample and quantity.
            ValueError: a KL term without `batch.reference_logprobs`, or a listwise loss over half a group.
        """
        self._check(batch)
        raw = quantities(batch, logprobs, entropy if self.config.entropy_coef > 0 else entropy.detach())
        finite = finite_tokens(batch.loss_mask, raw)  # [T] bool
        # 0 * inf and its gradient are NaN, a selected 0 is not.
        clean = {name: torch.where(finite, values, 0.0) for name, values in raw.items()}  # [T] each
        sequences = Sequences(batch.sequence_ids, finite.to(logprobs.dtype), len(batch.group_ids))
        log_weight = (clean["old_logprob"] - clean["sampler_logprob"]).detach()  # [T] log pi_old - log mu
        correction = self.mismatch(log_weight, sequences)
        inputs = LossInputs(
            logprobs=clean["policy_logprob"],
            old_logprobs=clean["sampler_logprob" if self.config.old_logprobs == "sampler" else "old_logprob"],
            advantages=clean["advantage"],
            mask=sequences.mask,
            correction=correction.weight,
            sequences=sequences,
            group_ids=batch.group_ids,
            mass=batch.mass,
            normalizers=batch.normalizers,
        )
        terms = self._terms(inputs, clean, batch.anchored)
        with torch.no_grad():
            tally = Tally()
            tally.sum("nonfinite/tokens", batch.loss_mask.sum() - inputs.mask.sum())
            record_losses(tally, terms, batch.loss_mask.sum(), inputs)
            self._record(tally, inputs, clean)
            record_sampler(tally, log_weight, correction, inputs)
            metrics = tally.to_metrics()
        if self.raises and metrics["nonfinite/tokens"].value > 0:
            raise_for_token(batch, raw)
        return LossOutput(terms["total"], metrics)

    def _check(self, batch: TrainBatch) -> None:
        if self.kl.in_loss and batch.reference_logprobs is None and len(batch.group_ids) > 0:
            raise ValueError(
                f"batch.reference_logprobs = None: expected the reference's log-probabilities, because "
                f"algorithm.kl.coef is {self.config.kl.coef}. Load a reference model (Algorithm.needs_reference) or set the "
                "coefficient to 0."
            )
        if self.requires_whole_groups:
            check_whole_groups(batch)

    def _terms(self, inputs: LossInputs, clean: dict[str, Tensor], anchored: Tensor) -> dict[str, Tensor]:
        """Each 0-d; `anchored` [S]."""
        terms = self.policy_loss.terms(inputs, self.aggregation)
        total = terms["policy"]
        if self.kl.in_loss and "reference_logprob" in clean:
            # A group without preference must not be moved by the reference alone.
            learning = inputs.sequences.expand(anchored.to(inputs.mask.dtype))  # [T]
            divergence = self.kl(inputs.logprobs, clean["reference_logprob"]) * learning  # [T]
            terms["kl"] = self.aggregation(divergence, inputs)
            terms["kl_weighted"] = self.config.kl.coef * terms["kl"]
            total = total + terms["kl_weighted"]
        terms["entropy"] = (clean["entropy"] * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)
        if self.config.entropy_coef > 0:
            terms["entropy_weighted"] = -self.config.entropy_coef * terms["entropy"]
            total = total + terms["entropy_weighted"]
        return terms | {"total": total}

    def _record(self, tally: Tally, inputs: LossInputs, clean: dict[str, Tensor]) -> None:
        tally.mean("policy/entropy", clean["entropy"], inputs.mask)
        tally.distribution("policy/token_entropy", clean["entropy"], inputs.mask)
        record_divergence(tally, "policy", clean["policy_logprob"] - clean["old_logprob"], inputs)
        if "reference_logprob" in clean:
            record_divergence(tally, "reference", clean["policy_logprob"] - clean["reference_logprob"], inputs)
        record_ratio(tally, self.token_loss, inputs)
        for key, (value, weight) in self.policy_loss.loss_metrics(inputs).items():
            tally.weighted_mean(key, value, weight)

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Move the controllers; call once a step on every rank with the same merged values of `controller_inputs`."""
        return self.policy_loss.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        """Controllers' state, the same on every rank; part of the checkpoint."""
        return {"loss": self.policy_loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.policy_loss.load_state_dict(state["loss"])


def check_whole_groups(batch: TrainBatch) -> None:
    """Raise ValueError unless the masses of each group's sequences with loss tokens sum to 1 in this micro-batch.

    A listwise loss over half a group is another loss, and nothing else would tell.
    """
    present = Sequences(batch.sequence_ids, batch.loss_mask, len(batch.group_ids)).present  # [S]
    same_group = batch.group_ids[:, None] == batch.group_ids[None, :]  # [S, S]
    mass = (same_group * (batch.mass * present)[None, :]).sum(dim=1)  # [S]
    broken = present & ((mass - 1).abs() > 1e-3)  # [S]
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"prompt {int(batch.group_ids[first])}: its masses sum to {float(mass[first]):.4f} in this micro-batch, "
            "expected 1. The loss spans whole groups: the packer must keep a prompt's completions together "
            "(Algorithm.requires_whole_groups)."
        )
