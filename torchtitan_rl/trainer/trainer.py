"""The trainer: turns a step's episodes into an update of the sharded policy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP, Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.decoder import Decoder

from torchtitan_rl import comm
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.algorithm import LossOutput
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.events import advanced
from torchtitan_rl.models.hf import hf_weights
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import (
    Companion,
    HeadReader,
    SeesPacks,
    TokenScores,
    forget_forwards,
    score,
)
from torchtitan_rl.trainer.logprob_diff import (
    fill_logprob_diff,
    share_measurements,
    token_rows,
)
from torchtitan_rl.trainer.minibatches import (
    Batcher,
    MiniBatch,
    split_groups,
)
from torchtitan_rl.trainer.model_loader import ModelLoader
from torchtitan_rl.trainer.optimizer import UpdateReport
from torchtitan_rl.trainer.packing import completion_values
from torchtitan_rl.trainer.step_checks import StepChecks
from torchtitan_rl.trainer.trainer_config import TrainerConfig
from torchtitan_rl.types import (
    Episode,
    FloatArray,
    Group,
    IntArray,
    Metric,
    SegmentLayout,
    TrainBatch,
    flat,
)


class _Step(NamedTuple):
    """The results of one optimizer step."""

    grad_norm: float
    applied: bool
    """False if loss or gradient were not finite and the update was skipped."""
    metrics: list[dict[str, Metric]]
    """Those of the objective for each of this rank's micro-batches."""


class _Forward(NamedTuple):
    """The results of one micro-batch's forward."""

    out: LossOutput
    scores: TokenScores
    """[T] each; without gradient once the backward is done."""


class Trainer(Configurable):
    """The sharded policy with its optimizer and schedule."""

    Config = TrainerConfig

    def __init__(
        self,
        config: TrainerConfig,
        *,
        models: ModelLoader,
        parallel_dims: ParallelDims,
        algorithm: Algorithm,
        num_steps: int,
        temperature: float,
        checks: Callable[[Decoder, OptimizersContainer], StepChecks],
        policy_lora: Lora | None = None,
    ) -> None:
        """Load the policy.

        Args:
            num_steps: steps of the controller, for the schedule.
            temperature: the sampling temperature of the episodes.
            checks: makes the checks of the updates.
            policy_lora: the adapters of `config.lora`; None for rank 0.
        """
        assert (policy_lora is not None) == (config.lora.rank > 0)
        self.lora = policy_lora
        self.config = config
        self.parallel_dims = parallel_dims
        self.algorithm = algorithm
        self.temperature = temperature
        self.models = models
        self.pad_multiple = models.pad_multiple
        self.state_dict_adapter = models.state_dict_adapter
        self.model = models.policy()
        if policy_lora:
            policy_lora.attach(self.model, self.state_dict_adapter)
        self._keeps_weights = config.parallelism.fsdp_reshard_after_forward == "never"
        self.optimizer = config.optimizer.build(model=self.model)
        self.checks = checks(self.model, self.optimizer)
        self.scheduler = config.lr_scheduler.build(
            optimizers=self.optimizer, training_steps=num_steps
        )
        self._settings: list[dict[str, Any]] = []
        for group in self.param_groups():
            settings = dict(group)
            del settings["params"]
            self._settings.append(settings)
        self._find_ranks()
        self.batcher = Batcher(
            algorithm,
            max_tokens=config.max_tokens_per_microbatch,
            multiple=self.pad_multiple,
            attention_cost=models.attention_cost(self.model),
            # FlashAttention cannot share prompts; that of a CPU, and of float32, can.
            share_prompts=self.model.config.first_attention.inner_attention.shares_prompts,
            num_ranks=self.dp_size,
            rank=self.dp_rank,
        )

    def _find_ranks(self) -> None:
        """Set this rank's place among the data-parallel and tensor-parallel ranks, and their groups."""
        dims = self.parallel_dims
        batch_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self.dp_size = batch_mesh.size() if batch_mesh else 1
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh else 0
        self.dp_group = batch_mesh.get_group() if batch_mesh else None
        tp_mesh = dims.get_optional_mesh("tp")
        self.is_tp_leader = tp_mesh is None or tp_mesh.get_local_rank() == 0

    def hf_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields the current policy's weights but adapters': see `models.hf.hf_weights`. Collective."""
        # With one rank there is nothing to gather, and FSDP would copy each weight twice.
        as_forward = dtype == TORCH_DTYPE_MAP[self.config.mixed_precision_param]
        whole_blocks = as_forward and self.parallel_dims.dp_shard > 1
        yield from hf_weights(self.model, self.state_dict_adapter, dtype, whole_blocks=whole_blocks)

    def update(
        self, groups: Sequence[Group[Episode]], teacher: Companion | None = None
    ) -> UpdateReport:
        """Take the step's optimizer steps; advance the schedule and the algorithm's controllers (coefficients that adapt; none
        by default).

        Args:
            teacher: from which a loss with a `divergence_beta` reads the divergence.

        Raises:
            SamplerFault: before the first optimizer step, on every rank.
            NonFiniteError: before an optimizer step, on the rank whose token is not finite.
            TrainingStopped: before an optimizer step with a loss or gradient that is not finite, unless
                `skip_nonfinite_updates` allows it, and after the last for a weight; on every rank.
        """
        config = self.config
        minibatches = [
            self.batcher.minibatch(part) for part in split_groups(groups, config.num_minibatches)
        ]
        several_steps = config.num_epochs * len(minibatches) > 1
        from_engine = self.algorithm.policy_loss.from_engine
        if from_engine and several_steps:
            self._keep_pi_old_logprobs(minibatches)
        metrics = [self.algorithm.group_metrics(groups)]  # before the controllers move
        norms: list[float] = []
        num_clipped = num_applied = 0
        for _ in range(config.num_epochs):
            for minibatch in minibatches:
                check = from_engine and not several_steps
                step = self._optimizer_step(minibatch, teacher, check_logprobs=check)
                metrics += step.metrics
                norms.append(step.grad_norm)
                num_clipped += step.grad_norm > config.max_norm
                num_applied += step.applied
        if norms:
            self.checks.check_weights()
        controlled = self._merged_means(metrics, self.algorithm.controller_inputs)
        metrics.append(self.algorithm.after_update(controlled))
        if isinstance(self.model, SeesPacks):
            metrics.append(self.model.update_metrics(self.dp_group))
        learning_rate = next(iter(self.scheduler.get_metrics().values()))
        self.scheduler.step()
        columns = teacher.columns if teacher else ()
        share_measurements(groups, columns, mine=self.is_tp_leader)
        return UpdateReport(
            grad_norm=norms[-1] if norms else 0.0,
            clipped_fraction=num_clipped / max(len(norms), 1),
            learning_rate=learning_rate,
            optimizer_steps=num_applied,
            metrics=metrics if self.is_tp_leader else [],
            **self._work(minibatches),
        )

    def _work(self, minibatches: Sequence[MiniBatch]) -> dict[str, Any]:
        """The fields of UpdateReport that count tokens and work, over all passes."""
        epochs = self.config.num_epochs
        counts = self.batcher.count(minibatches)
        packed = 0
        for minibatch in minibatches:
            packed += sum(batch.token_ids.numel() for batch in minibatch.batches)
        return {
            "work": epochs * np.stack([counts.forward, counts.backward]),  # [2, 3]
            "rank_tokens": counts.rank_tokens,
            "trained_tokens": epochs * sum(counts.rank_tokens),
            "forward_only_tokens": epochs * int(counts.forward[0] - counts.backward[0]),
            "packed_tokens": packed,
            "padding_tokens": packed - counts.rank_tokens[self.dp_rank],
        }

    @torch.no_grad()
    def _keep_pi_old_logprobs(self, minibatches: list[MiniBatch]) -> None:
        """Set `pi_old_logprobs` of every micro-batch before the first optimizer step, and compare them with the
        sampler's."""
        batches: list[TrainBatch] = []
        rows: list[Tensor] = []  # [2, M] each
        for minibatch in minibatches:
            batches += minibatch.batches
        for batch in batches:
            scores = self.score(batch)  # [T] each
            advanced()
            batch.pi_old_logprobs = scores.logprobs
            rows.append(token_rows(batch, scores))
        forget_forwards(self.model)
        [rows_on_host] = _on_host(rows)
        self._check_logprobs(batches, rows_on_host)

    def _check_logprobs(self, batches: Sequence[TrainBatch], rows: Sequence[Tensor]) -> None:
        """Set `logprob_diff` of the batches' episodes from each batch's `token_rows`, and check those of all ranks."""
        differences: list[FloatArray] = []  # [3, fresh loss tokens] each
        for batch, values in zip(batches, rows, strict=True):
            differences.append(fill_logprob_diff(batch, values[:2].numpy()))
        self.checks.check_logprobs(differences)

    def _optimizer_step(
        self, minibatch: MiniBatch, teacher: Companion | None, *, check_logprobs: bool
    ) -> _Step:
        """Run forward and backward over a mini-batch, then the optimizer.

        Args:
            check_logprobs: fill `logprob_diff` and check it, because the policy is still the one that sampled.
        """
        forwards = self._forward_backward(minibatch, teacher)
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        for forward in forwards:
            loss += forward.out.loss.detach()
        if self.dp_group is not None:
            dist.all_reduce(loss, group=self.dp_group)
        norm = clip_grad_norm_(
            self.model.parameters(),
            self.config.max_norm,
            foreach=True,
            ep_enabled=self.parallel_dims.ep_enabled,
        )  # 0-d
        numbers = [forward.out.tally.numbers() for forward in forwards]
        rows: list[Tensor] = []  # [2 + columns, M] each
        for batch, forward in zip(minibatch.batches, forwards, strict=True):
            rows.append(token_rows(batch, forward.scores))
        totals, numbers_on_host, rows_on_host = _on_host([loss, norm], numbers, rows)
        total_loss, grad_norm = map(float, totals)
        # Raises NonFiniteError on this rank alone if one of its tokens is not finite.
        metrics: list[dict[str, Metric]] = []
        for forward, values in zip(forwards, numbers_on_host, strict=True):
            metrics.append(forward.out.read(values))
        if teacher:
            for batch, values in zip(minibatch.batches, rows_on_host, strict=True):
                teacher.keep_columns(batch, values[2:].numpy())
        if check_logprobs:
            self._check_logprobs(minibatch.batches, rows_on_host)
        applied = self.checks.check_update(total_loss, grad_norm)
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients' memory for the engine
        return _Step(grad_norm, applied, metrics)

    def _forward_backward(self, minibatch: MiniBatch, teacher: Companion | None) -> list[_Forward]:
        """Run the micro-batches. The host waits for nothing, so a GPU always has work."""
        without_backward = minibatch.batches[: minibatch.num_forward_only]
        with_backward = minibatch.batches[minibatch.num_forward_only :]
        forwards: list[_Forward] = []
        with torch.no_grad():
            for batch in without_backward:
                forwards.append(self._forward_and_loss(batch, teacher))
        if without_backward and not self._keeps_weights:
            forget_forwards(self.model)
        for batch in with_backward:
            forward = self._forward_and_loss(batch, teacher)
            # If weights stay gathered, gradients are summed over ranks once, in the last backward.
            is_last = batch is with_backward[-1]
            _defer_reduction(self.model, self._keeps_weights and not is_last)
            # FSDP2 sums gradients over ranks (torchtitan sets its divisor to 1), as the shares of a loss add up.
            forward.out.loss.backward()
            forwards.append(_Forward(forward.out, forward.scores.each(Tensor.detach)))
        if teacher:
            teacher.free()
        return forwards

    def _forward_and_loss(self, batch: TrainBatch, teacher: Companion | None) -> _Forward:
        """The policy's forward over a micro-batch, and the objective's."""
        reader = teacher.reader(batch) if teacher else None
        scores = self.score(batch, reader)  # [T] each
        advanced()
        batch = replace(batch, token_columns={**batch.token_columns, **scores.columns})
        return _Forward(self.algorithm.loss(batch, scores.logprobs, scores.entropy), scores)

    def score(self, batch: TrainBatch, reader: HeadReader | None = None) -> TokenScores:
        """Returns what the policy says of a micro-batch's loss tokens, and what the teacher's `reader` adds: one forward."""
        return score(
            self.model,
            batch.token_ids,
            batch.labels,
            batch.layout,
            self.temperature,
            batch.loss_positions,
            batch.sampler_records,
            reader=reader,
        )

    def check_loaded(self) -> None:
        """Apply this config's optimizer settings and schedule after a start or a checkpoint is loaded.

        Raises TrainingStopped if loaded weights or moments are not finite.
        """
        for group, settings in zip(self.param_groups(), self._settings, strict=True):
            group.update(settings)
        for scheduler in self.scheduler:
            groups = scheduler.optimizer.param_groups
            for group, learning_rate in zip(groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = learning_rate
        self.checks.check_loaded()

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' parameter groups, with parameters and settings."""
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizer.optimizers:
            groups += optimizer.param_groups
        return groups

    def _merged_means(
        self, metrics: list[dict[str, Metric]], keys: Sequence[str]
    ) -> dict[str, float]:
        """Returns weighted means over micro-batches and data-parallel ranks, the same on every rank."""
        merged: dict[str, float] = {}
        for key in keys:
            total = weight = 0.0
            for of_microbatch in metrics:
                if key in of_microbatch:
                    metric = of_microbatch[key]
                    total += float(metric.value) * metric.weight
                    weight += metric.weight
            total = self.sum(total)
            weight = self.sum(weight)
            if weight:
                merged[key] = total / weight
        return merged

    @torch.no_grad()
    def token_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Returns log pi of token_ids[1:] at temperature 1, [L - 1], for the weight sync's probe. Collective."""
        padding = -len(token_ids) % self.pad_multiple
        tokens = torch.tensor([*token_ids, *[0] * padding], device=DEVICE_TYPE)  # [T]
        layout = SegmentLayout.of([len(tokens)], device=DEVICE_TYPE)
        logprobs = score(self.model, tokens, tokens.roll(-1), layout, 1.0).logprobs  # [T]
        forget_forwards(self.model)
        return logprobs[: len(token_ids) - 1].cpu().numpy()

    @torch.no_grad()
    def episode_logprobs(
        self, model: Decoder, groups: Sequence[Group[Episode]], *, temperature: float | None = None
    ) -> list[FloatArray]:
        """Returns the log-probability that `model` gives each token of each episode's completion, [L].

        At the sampling temperature unless another is given. Collective. Every rank gets those of all episodes, in the
        groups' order. An episode without sampled tokens gets zeros.
        """
        index = {id(episode): i for i, episode in enumerate(flat(groups))}
        mine: list[tuple[int, FloatArray]] = []
        for batch in self.batcher.microbatches(groups):
            scores = score(
                model,
                batch.token_ids,
                batch.labels,
                batch.layout,
                temperature or self.temperature,
                batch.loss_positions,
                batch.sampler_records if model.lm_head.reads_records else None,
            )  # [T] each
            forget_forwards(model)
            values = scores.logprobs[batch.loss_positions].cpu().numpy()  # [M]
            of_members = completion_values(batch, values)  # [L] each
            for member, logprobs in zip(batch.members, of_members, strict=True):
                mine.append((index[id(member.episode)], logprobs))
        # [L] each
        scored = [np.zeros_like(episode.completion.sampler_logprobs) for episode in flat(groups)]
        for i, logprobs in comm.all_gather_lists(mine if self.is_tp_leader else []):
            scored[i] = logprobs
        return scored

    def sum(self, value: float) -> float:
        """Returns the sum over data-parallel ranks."""
        if self.dp_group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        dist.all_reduce(tensor, group=self.dp_group)
        return float(tensor)


def _defer_reduction(model: Decoder, defer: bool) -> None:
    """With `defer`, the next backward keeps weights gathered and leaves the reduction of gradients to a later one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not defer, recurse=False)
            module.set_requires_gradient_sync(not defer, recurse=False)


def _on_host(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the lists with their tensors on the host, for which it waits once. Their dtypes are float32 or float64."""
    flat: list[Tensor] = []
    for tensors in lists:
        flat += [tensor.detach().double().flatten() for tensor in tensors]
    joined = torch.cat(flat).cpu()
    parts = iter(joined.split([len(part) for part in flat]))
    on_host: list[list[Tensor]] = []
    for tensors in lists:
        values: list[Tensor] = []
        for tensor in tensors:
            numbers = next(parts)
            values.append(numbers.view(tensor.shape).to(tensor.dtype))
        on_host.append(values)
    return on_host
