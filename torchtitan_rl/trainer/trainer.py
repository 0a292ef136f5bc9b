"""The trainer: turns a step's episodes into an update of the sharded policy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl import comm
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.algorithm import LossOutput
from torchtitan_rl.device import DEVICE_TYPE
from torchtitan_rl.events import advanced
from torchtitan_rl.models.experts import PackedQwen3
from torchtitan_rl.models.logprobs import all_reduce
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.score import (
    Companion,
    HeadReader,
    TokenScores,
    forget_forwards,
    score,
)
from torchtitan_rl.trainer.finite import FiniteUpdates
from torchtitan_rl.trainer.gate import LogprobGate
from torchtitan_rl.trainer.logprob_diff import (
    compare_with_sampler,
    keep_columns,
    share_measurements,
)
from torchtitan_rl.trainer.minibatches import Batcher, MiniBatch, split_groups
from torchtitan_rl.trainer.model_loader import ModelLoader
from torchtitan_rl.trainer.optimizer import UpdateReport
from torchtitan_rl.trainer.packing import completion_values
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


class _Gradient(NamedTuple):
    """What a mini-batch's forwards and backwards have left on the host; the gradient itself is the parameters'."""

    loss: float
    """The sum over all ranks."""
    norm: float
    """Before clipping."""
    scores: list[TokenScores]
    """[M] each: of this rank's micro-batches at their `loss_positions`."""
    metrics: list[dict[str, Metric]]
    """Those of the objective for each of this rank's micro-batches."""


class Trainer(Configurable):
    """The sharded policy with its optimizer and schedule."""

    Config = TrainerConfig

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_spec: ModelSpec,
        hf_assets_path: str,
        parallel_dims: ParallelDims,
        algorithm: Algorithm,
        num_steps: int,
        max_model_len: int,
        temperature: float,
        generator_dtype: str,
        router_replay: bool = False,
    ) -> None:
        """Load the policy. Collective.

        Args:
            hf_assets_path: the folder with the start's weights.
            num_steps: steps of the controller, for the schedule.
            max_model_len: the longest prompt and completion together.
            temperature: the sampling temperature of the episodes.
            generator_dtype: in which the engine computes, for the gate.
            router_replay: whether the sampler's records are experts (`Generator.Config`).
        """
        self.lora = Lora.of(config.lora)
        self.config = config
        self.parallel_dims = parallel_dims
        self.algorithm = algorithm
        self.temperature = temperature
        self.loader = ModelLoader(
            config,
            model_spec=model_spec,
            folder=hf_assets_path,
            parallel_dims=parallel_dims,
            max_model_len=max_model_len,
            lora=self.lora,
            router_replay=router_replay,
        )
        self.state_dict_adapter = self.loader.state_dict_adapter
        self.model = self.loader.policy()
        if self.lora:
            self.lora.attach(self.model, self.state_dict_adapter)
        self._keeps_weights = config.parallelism.fsdp_reshard_after_forward == "never"
        self.optimizer = config.optimizer.build(model=self.model)
        dtypes = {config.mixed_precision_param, generator_dtype}
        self.gate = LogprobGate(config.logprob_gate, dtypes=dtypes)
        skip = config.skip_nonfinite_updates
        self._finite = FiniteUpdates(self.model, self.optimizer, skip=skip)
        self.scheduler = config.lr_scheduler.build(
            optimizers=self.optimizer, training_steps=num_steps
        )
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups()
        ]
        batch_mesh = parallel_dims.get_optional_mesh("batch")
        self.dp_group = batch_mesh.get_group() if batch_mesh else None
        self.batcher = self._new_batcher(batch_mesh)
        tp_mesh = parallel_dims.get_optional_mesh("tp")
        self.is_tp_leader = tp_mesh is None or tp_mesh.get_local_rank() == 0

    def _new_batcher(self, data_parallel: DeviceMesh | None) -> Batcher:
        """Returns what divides a step into this rank's micro-batches."""
        return Batcher(
            algorithm=self.algorithm,
            max_tokens=self.config.max_tokens_per_microbatch,
            multiple=self.loader.pad_multiple,
            attention_cost=self.loader.attention_cost(self.model),
            # FlashAttention cannot share prompts; that of a CPU, and of float32, can.
            share_prompts=self.model.config.first_attention.inner_attention.shares_prompts,
            read_prompts_once=self.config.attention == "flex",
            num_ranks=data_parallel.size() if data_parallel else 1,
            rank=data_parallel.get_local_rank() if data_parallel else 0,
        )

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
        minibatches = self._minibatches(groups, teacher)
        from_engine = self.algorithm.policy_loss.from_engine
        scores_before: list[TokenScores] = []
        if from_engine and config.num_epochs * len(minibatches) > 1:
            scores_before = self._keep_pi_old_logprobs(minibatches)
        metrics = [self.algorithm.group_metrics(groups)]  # before the controllers move
        norms: list[float] = []
        num_clipped = num_applied = 0
        for _ in range(config.num_epochs):
            for minibatch in minibatches:
                gradient = self._gradient(minibatch, teacher)
                metrics += gradient.metrics
                if from_engine and not norms:  # the policy is still the one that sampled
                    self._compare_with_sampler(minibatches, scores_before or gradient.scores)
                num_applied += self._apply(gradient)
                norms.append(gradient.norm)
                num_clipped += gradient.norm > config.max_norm
        if norms:
            self._finite.check_weights()
        controlled = self._merged_means(metrics, self.algorithm.controller_inputs)
        metrics.append(self.algorithm.after_update(controlled))
        if isinstance(self.model, PackedQwen3):
            metrics.append(self.model.update_metrics(self.dp_group))
        learning_rate = next(iter(self.scheduler.get_metrics().values()))
        self.scheduler.step()
        columns = teacher.columns if teacher else ()
        share_measurements(groups, columns, mine=self.is_tp_leader)
        work, rank_tokens = self.batcher.count(minibatches)
        packed_tokens = sum(batch.token_ids.numel() for batch in _batches_of(minibatches))
        return UpdateReport(
            grad_norm=norms[-1] if norms else 0.0,
            clipped_fraction=num_clipped / max(len(norms), 1),
            learning_rate=learning_rate,
            optimizer_steps=num_applied,
            work=config.num_epochs * work,
            rank_tokens=rank_tokens,
            packed_tokens=packed_tokens,
            padding_tokens=packed_tokens - rank_tokens[self.batcher.rank],
            unscored_tokens=config.num_epochs * sum(made.unscored_tokens for made in minibatches),
            metrics=metrics if self.is_tp_leader else [],
        )

    def _minibatches(
        self, groups: Sequence[Group[Episode]], teacher: Companion | None
    ) -> list[MiniBatch]:
        # A controller's or a teacher's columns would be of those alone that chance draws.
        score_all = self.config.score_all or bool(teacher or self.algorithm.controller_inputs)
        parts = split_groups(groups, self.config.num_minibatches)
        return [self.batcher.minibatch(part, score_all=score_all) for part in parts]

    @torch.no_grad()
    def _keep_pi_old_logprobs(self, minibatches: Sequence[MiniBatch]) -> list[TokenScores]:
        """Set `pi_old_logprobs` of every micro-batch before the first optimizer step.

        Returns: the scores at each micro-batch's `loss_positions`, [M] each, on the host.
        """
        scores_of_batches: list[TokenScores] = []  # [M] each
        for batch in _batches_of(minibatches):
            scores = self.score(batch)  # [T] each
            advanced()
            batch.pi_old_logprobs = scores.logprobs
            scores_of_batches.append(scores.at(batch.loss_positions))
        forget_forwards(self.model)
        return _on_host([], scores_of_batches)[1]

    def _compare_with_sampler(
        self, minibatches: Sequence[MiniBatch], scores: Sequence[TokenScores]
    ) -> None:
        """Set `logprob_diff` of the step's episodes, and stop if trainer and sampler disagree.

        Args:
            scores: [M] of each micro-batch by the policy that sampled, on the host.
        """
        batches = _batches_of(minibatches)
        compared = [compare_with_sampler(b, own) for b, own in zip(batches, scores, strict=True)]
        self.gate.check(compared)

    def _gradient(self, minibatch: MiniBatch, teacher: Companion | None) -> _Gradient:
        """Run forward and backward over a mini-batch, and clip the gradient."""
        outputs, scores = zip(*self._forward_backward(minibatch, teacher), strict=True)
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        for output in outputs:
            loss += output.loss.detach()
        loss = all_reduce(loss, self.dp_group)
        norm = clip_grad_norm_(
            self.model.parameters(),
            self.config.max_norm,
            foreach=True,
            ep_enabled=self.parallel_dims.ep_enabled,
        )  # 0-d
        numbers = [output.tally.numbers() for output in outputs]
        (loss, norm, *numbers), scores = _on_host([loss, norm, *numbers], scores)
        # Raises NonFiniteError on this rank alone if one of its tokens is not finite.
        metrics = [output.read(values) for output, values in zip(outputs, numbers, strict=True)]
        for of_batch in metrics[: minibatch.num_forward_only]:
            for name, metric in of_batch.items():
                weight = metric.weight * minibatch.loss_tokens_for_one
                of_batch[name] = metric._replace(weight=weight)
        for batch, own in zip(minibatch.batches, scores, strict=True):
            keep_columns(batch, own.columns)
        return _Gradient(float(loss), float(norm), scores, metrics)

    def _apply(self, gradient: _Gradient) -> bool:
        """Take the optimizer step; returns False if loss or gradient were not finite and the step was skipped."""
        applied = self._finite.check_update(gradient.loss, gradient.norm)
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients' memory for the engine
        return applied

    def _forward_backward(
        self, minibatch: MiniBatch, teacher: Companion | None
    ) -> list[tuple[LossOutput, TokenScores]]:
        """Run the micro-batches. The host waits for nothing, so a GPU always has work. Returns `_forward`'s results."""
        without_backward = minibatch.batches[: minibatch.num_forward_only]
        with_backward = minibatch.batches[minibatch.num_forward_only :]
        with torch.no_grad():
            results = [self._forward(batch, teacher) for batch in without_backward]
        if without_backward and not self._keeps_weights:
            forget_forwards(self.model)
        for batch in with_backward:
            output, scores = self._forward(batch, teacher)
            # If weights stay gathered, gradients are summed over ranks once, in the last backward.
            is_reduced = batch is with_backward[-1] or not self._keeps_weights
            self.model.set_reshard_after_backward(is_reduced)
            self.model.set_requires_gradient_sync(is_reduced)
            # FSDP2 sums gradients over ranks (torchtitan sets its divisor to 1), as the shares of a loss add up.
            output.loss.backward()
            results.append((output, scores))
        if teacher:
            teacher.free()
        return results

    def _forward(
        self, batch: TrainBatch, teacher: Companion | None
    ) -> tuple[LossOutput, TokenScores]:
        """Returns the objective's results of a micro-batch, and the policy's scores [M] at `loss_positions`, without gradient."""
        reader = teacher.reader(batch) if teacher else None
        scores = self.score(batch, reader)  # [T] each
        advanced()
        batch = replace(batch, token_columns={**batch.token_columns, **scores.columns})
        output = self.algorithm.loss(batch, scores.logprobs, scores.entropy)
        return output, scores.at(batch.loss_positions)

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

    def after_load(self) -> None:
        """Apply this config's optimizer settings and schedule after a start or a checkpoint is loaded.

        Raises TrainingStopped if loaded weights or moments are not finite.
        """
        for group, settings in zip(self.param_groups(), self._settings, strict=True):
            group.update(settings)
        for scheduler in self.scheduler:
            groups = scheduler.optimizer.param_groups
            for group, learning_rate in zip(groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = learning_rate
        self._finite.check_loaded()

    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizer.optimizers for group in one.param_groups]

    def _merged_means(
        self, metrics: list[dict[str, Metric]], keys: Sequence[str]
    ) -> dict[str, float]:
        """Returns weighted means over micro-batches and data-parallel ranks, the same on every rank."""
        merged: dict[str, float] = {}
        for key in keys:
            own = [of_microbatch[key] for of_microbatch in metrics if key in of_microbatch]
            total = self.sum(sum(float(metric.value) * metric.weight for metric in own))
            weight = self.sum(sum(metric.weight for metric in own))
            if weight:
                merged[key] = total / weight
        return merged

    @torch.no_grad()
    def token_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Returns log pi of token_ids[1:] at temperature 1, [L - 1], for the weight sync's probe. Collective."""
        padding = -len(token_ids) % self.loader.pad_multiple
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
                batch.sampler_records if model.lm_head.config.reads_records else None,
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
        own = torch.tensor(value, dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        return float(all_reduce(own, self.dp_group))


def _batches_of(minibatches: Sequence[MiniBatch]) -> list[TrainBatch]:
    return [batch for minibatch in minibatches for batch in minibatch.batches]


def _on_host(
    tensors: Sequence[Tensor], scores: Sequence[TokenScores]
) -> tuple[list[Tensor], list[TokenScores]]:
    """Returns tensors and scores on the host, for which it waits once. A double holds all their values."""
    all_tensors = [*tensors]
    for own in scores:
        all_tensors += [own.logprobs, own.entropy, *own.columns.values()]
    joined = torch.cat([tensor.detach().double().flatten() for tensor in all_tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in all_tensors])
    on_host = iter(
        part.view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, all_tensors, strict=True)
    )
    numbers = [next(on_host) for _ in tensors]
    scores_on_host: list[TokenScores] = []
    for own in scores:
        logprobs, entropy = next(on_host), next(on_host)
        columns = {name: next(on_host) for name in own.columns}
        scores_on_host.append(TokenScores(logprobs, entropy, columns))
    return numbers, scores_on_host
