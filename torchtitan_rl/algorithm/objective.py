"""The loss of one micro-batch: cleaned inputs, the terms that add up to it, and its metrics."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_rl.types import Metric, TrainBatch

from .aggregations import Aggregation
from .episodes import check_whole_groups
from .inputs import LossInputs, Sequences
from .kl import KL
from .losses import PolicyLoss
from .metrics.loss_metrics import record_divergence, record_losses, record_ratio, record_sampler
from .metrics.tally import Tally
from .mismatch import Correction, Mismatch
from .nonfinite import finite_tokens, raise_for_token


class LossOutput(NamedTuple):
    """What `Algorithm.loss` returns for one micro-batch."""

    loss: Tensor
    """0-d, this micro-batch's share: shares of all micro-batches and data-parallel ranks sum to the step's loss."""
    metrics: dict[str, Metric]
    """Floats on the host; their merge over micro-batches and data-parallel ranks is exact."""


@dataclass(slots=True, kw_only=True)
class Quantities:
    """The [T] tensors that must be finite on loss tokens; the field names name them in errors."""

    policy_logprob: Tensor
    old_logprob: Tensor
    sampler_logprob: Tensor
    entropy: Tensor
    advantage: Tensor
    reference_logprob: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        pairs = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in pairs.items() if tensor is not None}

    def where(self, keep: Tensor) -> "Quantities":
        """0 wherever `keep` [T] is False: 0 * inf and its gradient are NaN, a selected 0 is not."""
        kept = {name: torch.where(keep, tensor, 0.0) for name, tensor in self.named().items()}
        return Quantities(**({"reference_logprob": None} | kept))


class Objective:
    """Policy loss, KL term and entropy bonus of one micro-batch."""

    def __init__(
        self,
        *,
        policy_loss: PolicyLoss,
        aggregation: Aggregation,
        mismatch: Mismatch,
        kl: KL,
        entropy_coef: float,
        old_is_sampler: bool,
        raise_nonfinite: bool,
    ) -> None:
        self.policy_loss = policy_loss
        self.aggregation = aggregation
        self.mismatch = mismatch
        self.kl = kl
        self.entropy_coef = entropy_coef
        self.old_is_sampler = old_is_sampler
        self.raise_nonfinite = raise_nonfinite

    def __call__(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        """See `Algorithm.loss`."""
        if self.kl.in_loss and batch.reference_logprobs is None and len(batch.group_ids) > 0:
            raise ValueError(
                f"batch.reference_logprobs = None: expected the reference's log-probabilities, because "
                f"algorithm.kl.coef is {self.kl.coef}. Load a reference model (Algorithm.needs_reference) or set the "
                "coefficient to 0."
            )
        if self.policy_loss.requires_whole_groups:
            check_whole_groups(batch)
        raw = self._quantities(batch, logprobs, entropy)
        finite = finite_tokens(batch.loss_mask, raw.named())  # [T] bool
        clean = raw.where(finite)
        sequences = Sequences(batch.sequence_ids, finite.to(logprobs.dtype), len(batch.group_ids))
        log_weight = (clean.old_logprob - clean.sampler_logprob).detach()  # [T] log pi_old - log mu
        correction = self.mismatch(log_weight, sequences)
        inputs = LossInputs(
            logprobs=clean.policy_logprob,
            old_logprobs=clean.sampler_logprob if self.old_is_sampler else clean.old_logprob,
            advantages=clean.advantage,
            mask=sequences.mask,
            correction=correction.weight,
            sequences=sequences,
            group_ids=batch.group_ids,
            weights=batch.weights,
            normalizers=batch.normalizers,
        )
        terms = self._terms(inputs, clean)
        metrics = self._metrics(inputs, clean, terms, log_weight, correction, batch.loss_mask.sum())
        if self.raise_nonfinite and metrics["nonfinite/tokens"].value > 0:
            raise_for_token(batch, raw.named())
        return LossOutput(terms["total"], metrics)

    def _quantities(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor) -> Quantities:
        return Quantities(
            policy_logprob=logprobs,
            # No stored log-probs: this is the first update, and pi_old is the policy itself.
            old_logprob=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            sampler_logprob=batch.sampler_logprobs,
            entropy=entropy if self.entropy_coef > 0 else entropy.detach(),
            advantage=batch.advantages,
            reference_logprob=batch.reference_logprobs,
        )

    def _terms(self, inputs: LossInputs, clean: Quantities) -> dict[str, Tensor]:
        policy = self.policy_loss.total(inputs, self.aggregation)  # 0-d
        terms = {"policy": policy}
        total = policy
        if self.kl.in_loss and clean.reference_logprob is not None:
            # A group without preference (weight 0) must not be moved by the reference alone.
            learning = inputs.sequences.expand((inputs.weights > 0).to(inputs.mask.dtype))  # [T]
            divergence = self.kl(inputs.logprobs, clean.reference_logprob) * learning  # [T]
            terms["kl"] = self.aggregation(divergence, inputs)
            terms["kl_weighted"] = self.kl.coef * terms["kl"]
            total = total + terms["kl_weighted"]
        terms["entropy"] = (clean.entropy * inputs.mask).sum() / max(inputs.normalizers.num_tokens, 1)
        if self.entropy_coef > 0:
            terms["entropy_weighted"] = -self.entropy_coef * terms["entropy"]
            total = total + terms["entropy_weighted"]
        return terms | {"total": total}

    @torch.no_grad()
    def _metrics(
        self,
        inputs: LossInputs,
        clean: Quantities,
        terms: dict[str, Tensor],
        log_weight: Tensor,
        correction: Correction,
        num_loss_tokens: Tensor,
    ) -> dict[str, Metric]:
        tally = Tally()
        tally.sum("nonfinite/tokens", num_loss_tokens - inputs.mask.sum())
        record_losses(tally, terms, num_loss_tokens, inputs)
        tally.mean("policy/entropy", clean.entropy, inputs.mask)
        record_divergence(tally, "policy", clean.policy_logprob - clean.old_logprob, inputs)
        if clean.reference_logprob is not None:
            record_divergence(tally, "reference", clean.policy_logprob - clean.reference_logprob, inputs)
        record_ratio(tally, self.policy_loss, inputs)
        record_sampler(tally, log_weight, correction.changed, inputs)
        self.policy_loss.record(tally, inputs)
        return tally.to_metrics()
