"""`Algorithm`: the training objective. Rewards become credit (credit.py), log-probabilities become a loss (`loss`).

The defaults are GRPO (arXiv 2402.03300) but for three things: the loss is a mean over all tokens of an optimizer step, as in
DAPO, instead of a mean of means; there is no KL to a reference; and if all rewards of a group are equal, their
advantages are exactly 0, without the rounding of a mean. With one optimizer step a training step, the default, pi_old is pi
and nothing is clipped. docs/papers.md says which fields make it Dr.GRPO, DAPO, GSPO or CISPO.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_rl.algorithm.advantages.advantage import Advantage
from torchtitan_rl.algorithm.advantages.grpo import Grpo
from torchtitan_rl.algorithm.aggregation import Aggregation, TokenMean
from torchtitan_rl.algorithm.credit import CreditAssignment, GroupFilter
from torchtitan_rl.algorithm.kl import KL
from torchtitan_rl.algorithm.loss_metrics import Tally, microbatch_tally
from torchtitan_rl.algorithm.losses.clip import Clip
from torchtitan_rl.algorithm.losses.loss import Loss, check_values
from torchtitan_rl.algorithm.losses.loss_inputs import LossInputs, Sequences
from torchtitan_rl.algorithm.losses.seed_grpo import SeedGrpo
from torchtitan_rl.algorithm.mismatch import Mismatch, NoCorrection
from torchtitan_rl.algorithm.nonfinite import finite_tokens, raise_for_token
from torchtitan_rl.algorithm.truncation import Truncation
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.fields.number import number
from torchtitan_rl.fields.own_config import OwnConfig
from torchtitan_rl.types import Episode, Group, Metric, Normalizers, TrainBatch


@dataclass(frozen=True)
class LossOutput:
    """The result of `Algorithm.loss` for one micro-batch. Its metrics stay on the device until `read` gets their numbers."""

    loss: Tensor
    """0-d share of the optimizer step's loss. The shares of all micro-batches and data-parallel ranks add up to it."""
    tally: Tally
    batch: TrainBatch
    checked: dict[str, Tensor]
    """[T] each, by name: `read` raises for a token at which one is not finite. Empty with nonfinite "mask"."""

    def read(self, numbers: Tensor) -> dict[str, Metric]:
        """Returns the metrics. Values are floats, or a float tensor [at most 4096] if the reduction is "distribution".

        Args:
            numbers: `tally.numbers()` on the host.

        Raises:
            NonFiniteError: with nonfinite "raise", naming prompt, sample and quantity.
        """
        metrics = self.tally.to_metrics(numbers)
        if self.checked and metrics["nonfinite/tokens"].value > 0:
            raise_for_token(self.batch, self.checked)
        return metrics


class Algorithm(OwnConfig):
    """The objective of a run: turns rewards into advantages, and log-probabilities into a loss.

    Its controllers are coefficients that adapt after each update, such as MaxEnt's tau. Methods are pure functions of
    their arguments, except for the controllers' state, which `state_dict` returns. Nothing communicates: groups are
    equal on every rank, and `loss` divides by counts of the whole optimizer step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OwnConfig.Config):
        advantage: Advantage.Config = field(default_factory=Grpo.Config)
        """Rewards to advantages: Grpo, or another of algorithm/advantages/."""
        loss: Loss.Config = field(default_factory=Clip.Config)
        """The policy loss: Clip, or another of algorithm/losses/."""
        credit: Literal["episode", "turn"] = "episode"
        """One advantage for the whole completion, or one for each turn of a conversation, from the rewards of that
        turn and later ones."""
        aggregation: Aggregation.Config = field(default_factory=TokenMean.Config)
        """Token losses to one number: TokenMean, SeqMeanTokenMean or SeqSumConst."""
        mismatch: Mismatch.Config = field(default_factory=NoCorrection.Config)
        """Correction for the difference between the sampler's and the trainer's log-probabilities."""
        kl: KL.Config = field(default_factory=KL.Config)
        """The penalty for moving away from a frozen reference; off by default."""
        entropy_coef: float = number(0.0, least=0)
        """Weight of the entropy bonus, token-weighted; 0 for none."""
        truncation: Truncation.Config = field(default_factory=Truncation.Config)
        """The treatment of completions that were cut by the length limit or a conversation's limits."""
        zero_variance: Literal["keep", "drop", "refill"] = "keep"
        """Groups whose rewards are all equal (credit "turn": at every turn). Keep: advantage 0, counted in the
        normalisers. Drop: left out of the forward. Refill: replaced by groups of new prompts; if their rewards are
        all equal too, they are dropped."""
        refill_rounds: int = number(1, least=1)
        """With zero_variance "refill": the largest number of rounds of new prompts per step."""
        group_filter: GroupFilter.Config | None = None
        """Leaves out further groups, each with its own reason; "refill" replaces them too. None: no further ones."""
        seed_grpo: SeedGrpo.Config | None = None
        """Scales advantages down by the group's semantic entropy; None: off."""
        old_logprobs: Literal["policy", "sampler"] = "policy"
        """The ratio's denominator: the trainer's log-probabilities before the first update, or the sampler's."""
        nonfinite: Literal["raise", "mask"] = "raise"
        """NaN or infinite advantages and log-probabilities; of rewards see grader.on_failure. Raise: an error that names
        the prompt, the sample and the source. Mask: they are left out of the loss and counted."""

        def __post_init__(self) -> None:
            corrects = not isinstance(self.mismatch, NoCorrection.Config)
            expected = 'no correction with old_logprobs "sampler"'
            remedy = 'The ratio already uses the sampler; use old_logprobs "policy" to correct separately.'
            holds = not (corrects and self.old_logprobs == "sampler")
            expect(holds, "algorithm.mismatch", self.mismatch, expected, remedy)
            self.loss.check_objective(self)
            self.advantage.check_objective(self)

    def __init__(self, config: Config, *, max_completion_tokens: int) -> None:
        """
        Args:
            max_completion_tokens: the longest completion that is sampled for training.
        """
        super().__init__(config)
        self.max_completion_tokens = max_completion_tokens
        self.policy_loss = config.loss.build()
        self.aggregation = config.aggregation.build()
        self.mismatch = config.mismatch.build()
        self.kl = config.kl.build()
        self.credit = CreditAssignment(config, self.policy_loss, max_completion_tokens)
        """Rewards become advantages: `algorithm.credit.assign(groups)`."""
        self.needs_reference = self.credit.needs_reference
        self.refill_rounds = config.refill_rounds if config.zero_variance == "refill" else 0
        """The largest number of rounds of new prompts per step, to replace groups that are left out."""
        self.controller_inputs = self.policy_loss.controller_inputs
        """Keys of the merged metrics that `after_update` reads; empty without controllers."""

    def validate_sampling(self, n: int) -> None:
        """Raise UserError if the objective does not work with n completions per prompt."""
        if not self.policy_loss.from_engine:
            one = "1 with a loss of demonstrations, as a row has one completion"
            expect(n == 1, "sampling.n", n, one, "Use 1.")
        elif self.policy_loss.uses_rewards:
            baseline = "at least 2 completions per prompt, because the group is its own baseline"
            expect(n >= 2, "sampling.n", n, baseline, "Use 4 or more; 8 and 16 are common.")

    def zero_gradient(self, episode: Episode) -> bool:
        """Whether the whole objective has zero gradient for this episode, so that it needs no backward pass."""
        if self.config.entropy_coef > 0 or self.kl.in_loss:
            return False
        return self.policy_loss.zero_without_advantage and not episode.credit.has_advantage

    def normalizers(self, groups: list[Group[Episode]]) -> Normalizers:
        """The counts that the losses of an optimizer step over `groups` divide by. Only sampled tokens in the loss count."""
        num_tokens = num_sequences = num_groups = 0
        for group in groups:
            in_loss = [episode for episode in group.samples if episode.in_loss]
            lengths = [episode.completion.num_sampled for episode in in_loss]
            num_tokens += sum(lengths)
            num_sequences += sum(length > 0 for length in lengths)
            num_groups += any(lengths)
        return Normalizers(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_groups=num_groups,
            max_completion_tokens=self.max_completion_tokens,
        )

    def group_metrics(self, groups: list[Group[Episode]]) -> dict[str, Metric]:
        """The objective's own metrics of the step's groups; the same on every rank. Call it before `after_update`."""
        metrics = self.policy_loss.group_metrics(groups)
        if self.credit.seed_grpo is not None:
            metrics |= self.credit.seed_grpo.metrics(groups)
        return metrics

    def loss(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        """The loss of one packed micro-batch.

        Args:
            batch: T tokens, S sequences.
            logprobs: [T] log pi of `batch.labels`, with gradient. Values outside the loss mask are ignored.
            entropy: [T] H(pi) in nats, with gradient. Values outside the loss mask are ignored.

        Returns:
            The share of the step's loss, and the micro-batch's metrics, which raise NonFiniteError when they are read and
            a token is not finite (with nonfinite "raise"). The loss always depends on `logprobs`, so that
            every rank can run its backward; without loss tokens it is 0 with zero gradient.

        Raises:
            UserError: a part of the objective returned another shape, or a loss without a gradient.
        """
        known = batch.token_columns | self._label_values(batch, logprobs, entropy)  # [T] each
        finite = finite_tokens(batch.loss_mask, known)  # [T] bool
        # A product with a mask would not do: 0 * inf and its gradient are NaN.
        usable = {name: torch.where(finite, values, 0.0) for name, values in known.items()}
        mask = finite.to(logprobs.dtype)  # [T]
        sequences = Sequences(batch.sequence_ids, mask, len(batch.group_ids))
        log_pi_old = usable["pi_old_logprobs"]  # [T]
        log_mu = usable["sampler_logprobs"]  # [T]
        correction = self.mismatch(log_pi_old - log_mu, sequences)
        check_values("algorithm.mismatch", self.mismatch, correction.weight, mask.shape)
        inputs = LossInputs(
            logprobs=usable["logprobs"],
            old_logprobs=log_mu if self.config.old_logprobs == "sampler" else log_pi_old,
            advantages=usable["advantages"],
            mask=mask,
            entropy=usable["entropy"],
            sampler_logprobs=log_mu,
            reference_logprobs=usable.get("reference_logprobs"),
            correction=correction.weight,
            sequences=sequences,
            group_ids=batch.group_ids,
            normalizers=batch.normalizers,
            columns=batch.columns,
            token_columns={name: usable[name] for name in batch.token_columns},
        )
        terms = self._terms(inputs)
        tally = microbatch_tally(
            batch, inputs, terms, log_pi_old, correction, self.policy_loss.from_engine
        )
        raises = self.config.nonfinite == "raise"
        checked = {name: values.detach() for name, values in known.items() if raises}  # [T] each
        return LossOutput(terms["total"], tally, batch, checked)

    def _label_values(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor
    ) -> dict[str, Tensor]:
        """What is known of each label, [T] each.

        logprobs: log pi of the policy that is updated, with gradient. pi_old_logprobs: log pi_old of the policy before the
        training step's first optimizer step. If that is the only one, or if no engine sampled, none are stored: pi_old is
        then pi, so the ratio pi / pi_old is 1, with the gradient of log pi. sampler_logprobs: log mu of the engine that
        sampled; log pi_old for a loss with `from_engine` False. reference_logprobs: log pi_ref of the frozen reference, if
        there is one.
        """
        old = logprobs.detach() if batch.pi_old_logprobs is None else batch.pi_old_logprobs  # [T]
        values = {
            "logprobs": logprobs,
            "pi_old_logprobs": old,
            "sampler_logprobs": batch.sampler_logprobs if self.policy_loss.from_engine else old,
            "entropy": entropy,
            "advantages": batch.advantages,
        }
        if batch.reference_logprobs is not None:
            values["reference_logprobs"] = batch.reference_logprobs
        return values

    def _terms(self, inputs: LossInputs) -> dict[str, Tensor]:
        """The parts of the loss and their "total", 0-d each."""
        terms = self.policy_loss.terms(inputs, self.aggregation)
        total = terms["policy"]
        if inputs.logprobs.requires_grad and not total.requires_grad:
            raise UserError(
                f"algorithm.loss: {type(self.policy_loss).__qualname__} returned a loss without a gradient, so nothing would be "
                "learned. Compute it from inputs.logprobs, without detach(), item(), numpy() or torch.no_grad()."
            )
        if self.kl.in_loss and len(inputs.group_ids) > 0:
            kl = self.kl(inputs.logprobs, inputs.reference_logprobs)  # [T]
            terms["kl"] = self.aggregation(kl, inputs)
            terms["kl_weighted"] = self.config.kl.coef * terms["kl"]
            total = total + terms["kl_weighted"]
        num_tokens = max(inputs.normalizers.num_tokens, 1)
        terms["entropy"] = (inputs.entropy * inputs.mask).sum() / num_tokens
        if self.config.entropy_coef > 0:
            terms["entropy_weighted"] = -self.config.entropy_coef * terms["entropy"]
            total = total + terms["entropy_weighted"]
        return terms | {"total": total}

    def after_update(self, stats: dict[str, float]) -> dict[str, Metric]:
        """Update the controllers. Call it once a step on every rank, with the same merged `controller_inputs`."""
        return self.policy_loss.after_update(stats)

    def state_dict(self) -> dict[str, Any]:
        """The controllers' state for the checkpoint; the same on every rank."""
        return {"loss": self.policy_loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_loss.load_state_dict(state["loss"])
