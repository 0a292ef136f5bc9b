"""The trainer: turns a step's episodes into an update of the sharded policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, Configurable, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.core import comm
from torchtitan_rl.core.algorithm import Algorithm
from torchtitan_rl.core.algorithm.algorithm import LossOutput
from torchtitan_rl.core.algorithm.losses import DIVERGENCE, TEACHER_TOKEN
from torchtitan_rl.core.device import DEVICE_TYPE, ON_CPU
from torchtitan_rl.core.events import progress
from torchtitan_rl.core.services import PolicyLora
from torchtitan_rl.core.trainer.attention import shares_prompts
from torchtitan_rl.core.trainer.experts import routing_metrics
from torchtitan_rl.core.trainer.finite import FiniteUpdates
from torchtitan_rl.core.trainer.gate import LogprobDiffs, diff_rows, fill_logprob_diff
from torchtitan_rl.core.trainer.hf import hf_weights, load_hf_weights
from torchtitan_rl.core.trainer.norms import MeasuredSteps
from torchtitan_rl.core.trainer.optimizer import UpdateReport
from torchtitan_rl.core.trainer.packing import (
    Item,
    completion_values,
    count_work,
    items_of,
    num_tokens,
    pack,
    plan_microbatches,
    split_groups,
)
from torchtitan_rl.core.trainer.policy import (
    build_policy,
    keep_weights,
    model_config,
    score,
    score_only,
    teacher_output,
)
from torchtitan_rl.core.trainer.trainer_config import TrainerConfig
from torchtitan_rl.core.types import (
    Episode,
    FloatArray,
    Group,
    IntArray,
    Member,
    Metric,
    SequenceLayout,
    TrainBatch,
    flat,
)

Plan = list[list[list[Member]]]
"""[data-parallel rank][micro-batch] -> the members of one forward, the same on every rank."""


class _MiniBatch(NamedTuple):
    """The micro-batches of one optimizer step. Every data-parallel rank has equally many."""

    plan: Plan
    num_forward_only: int
    """The first micro-batches have no gradient. They get a forward, for metrics and the logprob check, and no
    backward."""
    batches: list[TrainBatch]
    """This rank's. At least one gets a backward."""


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
    logprobs: Tensor
    """[T] log pi of the labels, with gradient."""
    entropy: Tensor
    """[T] H(pi), without gradient."""
    compared: list[Tensor]
    """With a teacher [2, T] float64: the divergence from it and its most likely token; otherwise empty."""


@dataclass
class _Counts:
    """The work of one pass over the step, of all ranks."""

    rank_tokens: list[int]
    """Tokens in the forwards of each data-parallel rank."""
    forward: FloatArray
    """[3] the sum of `packing.count_work` over the forwards."""
    backward: FloatArray
    """[3] the same over the backwards."""


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
        dump_folder: str,
        policy_lora: PolicyLora | None = None,
    ) -> None:
        """Build the policy and load `hf_assets_path` into it.

        Args:
            num_steps: steps of the controller, for the schedule.
            temperature: the sampling temperature of the episodes.
            generator_dtype: the dtype in which the engine computes, for the gate.
            policy_lora: the adapters of `config.lora`; None for rank 0.
        """
        assert (policy_lora is not None) == (config.lora.rank > 0)
        self.lora = policy_lora
        self.config = config
        self.parallel_dims = parallel_dims
        self.algorithm = algorithm
        self.temperature = temperature
        # Kernels are compiled for each shape, so shapes must be few. Sequence parallelism splits the packed tokens.
        self.pad_multiple = 128 * parallel_dims.tp
        self.max_positions = -(-max_model_len // self.pad_multiple) * self.pad_multiple
        self._model_spec = model_spec
        self._dump_folder = dump_folder
        self.hf_assets_path = hf_assets_path
        self.state_dict_adapter = model_spec.state_dict_adapter(model_spec.model, None)
        self.logprob_gate = config.logprob_gate.build(
            dtypes={config.mixed_precision_param, generator_dtype}
        )
        self.model = self.load_policy()
        if policy_lora:
            policy_lora.attach(self.model, self.state_dict_adapter)
        self.shares_prompts = shares_prompts(self.model)
        self._teacher: Decoder | None = None
        self._keeps_weights = config.parallelism.fsdp_reshard_after_forward == "never"
        self.optimizer = config.optimizer.build(model=self.model)
        self._steps = MeasuredSteps(self.optimizer)
        self.finite = FiniteUpdates(self.model, self.optimizer, skip=config.skip_nonfinite_updates)
        self.scheduler = config.lr_scheduler.build(
            optimizers=self.optimizer, training_steps=num_steps
        )
        self._settings: list[dict[str, Any]] = []
        for group in self.param_groups():
            self._settings.append({k: v for k, v in group.items() if k != "params"})
        self._warned_of_size = False
        self._find_ranks()

    def _find_ranks(self) -> None:
        """Set this rank's place among the data-parallel and tensor-parallel ranks, and their groups."""
        dims = self.parallel_dims
        batch_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        self.dp_size = batch_mesh.size() if batch_mesh else 1
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh else 0
        self.dp_group = batch_mesh.get_group() if batch_mesh else None
        self._all_ranks = dist.group.WORLD if dist.get_world_size() > 1 else None
        tp_mesh = dims.get_optional_mesh("tp")
        self._is_tp_leader = tp_mesh is None or tp_mesh.get_local_rank() == 0

    def load_policy(self) -> Decoder:
        """Returns a sharded model with the start's weights, and with adapters if the policy has them. Collective."""
        return self._load(self._model_spec, self.hf_assets_path, "float32", self.lora)

    def load_frozen(self, model_spec: ModelSpec, folder: Path) -> Decoder:
        """Returns another model with a folder's weights in the forward's dtype, sharded as the policy. Collective."""
        dtype = self.config.mixed_precision_param
        return self._load(model_spec, str(folder), dtype, None).requires_grad_(False)

    def load_teacher(self, model_spec: ModelSpec, folder: Path) -> None:
        """Load the frozen model from which a loss with `divergence_beta` takes the policy's divergence. Collective."""
        self._teacher = self.load_frozen(model_spec, folder)
        self.shares_prompts = self.shares_prompts and shares_prompts(self._teacher)

    def _load(
        self, model_spec: ModelSpec, folder: str, dtype: str, lora: PolicyLora | None
    ) -> Decoder:
        config = self.config
        training = TrainingConfig(
            seq_len=self.max_positions,
            dtype=dtype,
            mixed_precision_param=config.mixed_precision_param,
        )
        architecture = model_config(
            model_spec,
            config.parallelism,
            training,
            config.logprob_chunk_tokens,
            not ON_CPU if config.compile_head == "auto" else config.compile_head,
        )
        if lora:
            architecture = lora.convert(architecture)
        model = build_policy(
            model_spec,
            architecture,
            parallel_dims=self.parallel_dims,
            parallelism=config.parallelism,
            training=training,
            compile_config=CompileConfig(enable=config.compile, components=["model"]),
            activation_checkpoint=config.activation_checkpoint,
            dump_folder=self._dump_folder,
        )
        load_hf_weights(model, model_spec.state_dict_adapter(model_spec.model, None), folder)
        return model

    def hf_weights(
        self, dtype: torch.dtype, *, adapters_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the current policy for the generator: see `trainer.hf.hf_weights`. Adapters come last."""
        as_forward = dtype == TORCH_DTYPE_MAP[self.config.mixed_precision_param]
        # With one rank there is nothing to gather, and FSDP would copy each weight twice.
        if not adapters_only:
            whole_blocks = as_forward and self.parallel_dims.dp_shard > 1
            yield from hf_weights(
                self.model, self.state_dict_adapter, dtype, whole_blocks=whole_blocks
            )
        if self.lora:
            yield from self.lora.weights(dtype)

    def update(self, groups: Sequence[Group[Episode]]) -> UpdateReport:
        """Take the step's optimizer steps and advance the schedule and the algorithm's controllers.

        Raises NonFiniteLossError or LogprobGateError on every rank, before the optimizer steps.
        """
        config = self.config
        minibatches = [
            self.pack_minibatch(part) for part in split_groups(groups, config.num_minibatches)
        ]
        single_step = config.num_epochs * len(minibatches) == 1
        sampled = self.algorithm.policy_loss.sampled
        if sampled and not single_step:
            self._keep_old_logprobs(minibatches)
        metrics = [self.algorithm.group_metrics(groups)]  # before the controllers move
        norms: list[float] = []
        num_applied = 0
        for _ in range(config.num_epochs):
            for minibatch in minibatches:
                step = self._optimizer_step(minibatch, check_logprobs=sampled and single_step)
                metrics += step.metrics
                norms.append(step.grad_norm)
                num_applied += step.applied
        update_norm, weight_norm = self._steps.update_and_weight_norm() if norms else (0.0, 0.0)
        self.finite.check_weights(weight_norm)
        controlled = self._merged_means(metrics, self.algorithm.controller_inputs)
        metrics.append(self.algorithm.after_update(controlled))
        metrics.append(routing_metrics(self.model, self.dp_group))
        learning_rate = next(iter(self.scheduler.get_metrics().values()))
        self.scheduler.step()
        self._share_logprob_diffs(groups)
        counts = self._count_work(minibatches)
        packed = 0
        for minibatch in minibatches:
            packed += sum(batch.token_ids.numel() for batch in minibatch.batches)
        return UpdateReport(
            grad_norm=norms[-1] if norms else 0.0,
            clipped_fraction=sum(norm > config.max_norm for norm in norms) / max(len(norms), 1),
            update_ratio=update_norm / weight_norm if weight_norm else 0.0,
            learning_rate=learning_rate,
            optimizer_steps=num_applied,
            work=config.num_epochs * np.stack([counts.forward, counts.backward]),  # [2, 3]
            rank_tokens=counts.rank_tokens,
            trained_tokens=config.num_epochs * sum(counts.rank_tokens),
            forward_only_tokens=config.num_epochs * int(counts.forward[0] - counts.backward[0]),
            packed_tokens=packed,
            padding_tokens=packed - counts.rank_tokens[self.dp_rank],
            metrics=metrics if self._is_tp_leader else [],
        )

    def _keep_old_logprobs(self, minibatches: list[_MiniBatch]) -> None:
        """Set `old_logprobs` of every micro-batch before the first optimizer step, and compare them with the
        sampler's."""
        batches: list[TrainBatch] = []
        rows: list[Tensor] = []  # [4, T] each
        for minibatch in minibatches:
            batches += minibatch.batches
        for batch in batches:
            batch.old_logprobs = self._score(self.model, batch)  # [T]
            rows.append(diff_rows(batch, batch.old_logprobs))
        self._check_logprobs(batches, _on_host(rows))

    def _check_logprobs(
        self, batches: Sequence[TrainBatch], rows: Sequence[Tensor], others: Sequence[str] = ()
    ) -> None:
        """Set `logprob_diff` of the batches' episodes from each batch's `diff_rows`, and check those of all ranks."""
        diffs = LogprobDiffs()
        for batch, values in zip(batches, rows, strict=True):
            diffs.add(fill_logprob_diff(batch, values.numpy(), others))
        self.logprob_gate.check(diffs.merged(self._all_ranks))

    def _optimizer_step(self, minibatch: _MiniBatch, *, check_logprobs: bool) -> _Step:
        """Run forward and backward over a mini-batch, then the optimizer.

        Until the last backward has been launched the host waits for nothing, so a GPU always has work.

        Args:
            check_logprobs: fill `logprob_diff` and check it, because the policy is still the one that sampled.
        """
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        outputs: list[LossOutput] = []
        rows: list[Tensor] = []  # [5, T] each
        compared: list[Tensor] = []  # [2, T] each
        for i, batch in enumerate(minibatch.batches):
            has_backward = i >= minibatch.num_forward_only
            # FSDP still awaits a backward of the forward-only batches before this one: see `score_only`.
            after_forward_only = i > 0 and i == minibatch.num_forward_only
            if after_forward_only and not self._keeps_weights:
                self.model.reset_iter_state()
            with torch.set_grad_enabled(has_backward):
                out, logprobs, entropy, of_teacher = self._forward(batch)
            if has_backward:
                keep_weights(self.model, self._keeps_weights and batch is not minibatch.batches[-1])
                out.loss.backward()
            loss += out.loss.detach()
            outputs.append(out)
            compared += of_teacher
            if check_logprobs:
                rows.append(diff_rows(batch, logprobs.detach(), entropy=entropy))
        if self.dp_group is not None:
            dist.all_reduce(loss, group=self.dp_group)
        norm = clip_grad_norm_(
            self.model.parameters(),
            self.config.max_norm,
            foreach=True,
            ep_enabled=self.parallel_dims.ep_enabled,
        )  # 0-d
        numbers = [out.tally.numbers() for out in outputs]
        on_host = iter(_on_host([loss, norm, *numbers, *compared, *rows]))
        total, grad_norm = float(next(on_host)), float(next(on_host))
        metrics: list[dict[str, Metric]] = []
        for out in outputs:
            metrics.append(out.read(next(on_host)))
        if compared:
            for batch in minibatch.batches:
                self._keep_compared(batch, next(on_host))
        if check_logprobs:
            self._check_logprobs(minibatch.batches, list(on_host), ["entropy"])
        applied = self.finite.allows(total, grad_norm)
        if applied:
            self._steps.step()
        self.optimizer.zero_grad()  # frees the gradients' memory for the engine
        if self._teacher is not None:
            self._teacher.reset_iter_state()  # frees its head
        return _Step(grad_norm, applied, metrics)

    def _forward(self, batch: TrainBatch) -> _Forward:
        """Returns a micro-batch's loss. One forward of the policy, and one of the teacher if the loss reads the
        divergence."""
        if self._teacher is None:
            inputs = batch.token_ids, batch.labels, batch.layout, self.temperature, batch.scored
            logprobs, entropy = score(self.model, *inputs)  # [T] each
            compared = []
        else:
            logprobs, entropy, divergence, best = self._compare(batch)  # [T] each
            batch = replace(batch, token_columns={**batch.token_columns, DIVERGENCE: divergence})
            compared = [_comparison(divergence, best)]
        out = self.algorithm.loss(batch, logprobs, entropy)
        return _Forward(out, logprobs, entropy.detach(), compared)

    def _compare(self, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns log pi and H(pi) of a micro-batch, the divergence from the teacher, and the teacher's most likely
        token, [T] each."""
        inputs = batch.token_ids, batch.labels, batch.layout, self.temperature, batch.scored
        beta = self.algorithm.policy_loss.divergence_beta
        with self.model.lm_head.comparing(teacher_output(self._teacher, *inputs), beta):
            return score(self.model, *inputs)

    def _keep_compared(self, batch: TrainBatch, compared: Tensor) -> None:
        """Give the episodes their part of `_Forward.compared` [2, T], which is on the host now."""
        for name, values in zip((DIVERGENCE, TEACHER_TOKEN), compared, strict=True):
            found = completion_values(batch, values, share_prompts=self.shares_prompts)  # [L] each
            for member, of_member in zip(batch.members, found, strict=True):
                member.episode.credit.token_columns[name] = of_member

    @torch.no_grad()
    def divergence(self, groups: Sequence[Group[Episode]]) -> float | None:
        """Returns the mean divergence from the teacher over sampled tokens; None if the loss reads none. Collective.

        The episodes of this rank's micro-batches keep the divergence of their tokens.
        """
        if self._teacher is None:
            return None
        total = count = 0.0
        items = items_of(groups, whole_groups=False)
        for batch in self._pack(self._plan(items), groups, share_prompts=self.shares_prompts):
            *_, divergence, best = self._compare(batch)  # [T] each
            self._keep_compared(batch, _comparison(divergence, best).cpu())
            total += float((divergence * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
            self.model.reset_iter_state()
        self._teacher.reset_iter_state()
        return self._sum(total) / max(self._sum(count), 1.0)

    def check_loaded(self) -> None:
        """Apply this config's optimizer settings and schedule after a start or a checkpoint is loaded.

        Raises NonFiniteLossError if loaded weights or moments are not finite.
        """
        for group, settings in zip(self.param_groups(), self._settings, strict=True):
            group.update(settings)
        for scheduler in self.scheduler:
            for group, learning_rate in zip(
                scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True
            ):
                group["lr"] = learning_rate
        self.finite.check_loaded()

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
            found = [m[key] for m in metrics if key in m]
            total = self._sum(sum(float(m.value) * m.weight for m in found))
            weight = self._sum(sum(m.weight for m in found))
            if weight:
                merged[key] = total / weight
        return merged

    def score_tokens(self, model: Decoder, groups: Sequence[Group[Episode]]) -> list[FloatArray]:
        """Returns the log-probability that `model` gives each token of each episode's completion, [L]. Collective.

        Every rank gets those of all episodes, in the groups' order. An episode without sampled tokens gets zeros.
        """
        items = items_of(groups, whole_groups=self.algorithm.policy_loss.whole_groups)
        index = {id(episode): i for i, episode in enumerate(flat(groups))}
        mine: list[tuple[int, FloatArray]] = []
        shares = shares_prompts(model)
        for batch in self._pack(self._plan(items), groups, share_prompts=shares):
            logprobs = self._score(model, batch)  # [T]
            found = completion_values(batch, logprobs, share_prompts=shares)  # [L] each
            for member, values in zip(batch.members, found, strict=True):
                mine.append((index[id(member.episode)], values))
        # [L] each
        scored = [np.zeros_like(episode.completion.sampler_logprobs) for episode in flat(groups)]
        for i, logprobs in comm.all_gather_lists(mine if self._is_tp_leader else []):
            scored[i] = logprobs
        return scored

    def token_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Returns log pi of token_ids[1:] at temperature 1, [L - 1], for the weight sync's probe. Collective."""
        padding = -len(token_ids) % self.pad_multiple
        tokens = torch.tensor([*token_ids, *[0] * padding], device=DEVICE_TYPE)  # [T]
        layout = SequenceLayout.of([len(tokens)], device=DEVICE_TYPE)
        logprobs = score_only(self.model, tokens, tokens.roll(-1), layout, 1.0)  # [T]
        return logprobs[: len(token_ids) - 1].cpu().numpy()

    def _share_logprob_diffs(self, groups: Sequence[Group[Episode]]) -> None:
        """Set every episode's `logprob_diff` on every rank, without the tokens' values of other ranks' episodes."""
        episodes = flat(groups)
        mine = [
            (i, replace(e.logprob_diff, tokens={}))
            for i, e in enumerate(episodes)
            if e.logprob_diff is not None
        ]
        for i, diff in comm.all_gather_lists(mine if self._is_tp_leader else []):
            episodes[i].logprob_diff = episodes[i].logprob_diff or diff

    def _score(self, model: Decoder, batch: TrainBatch) -> Tensor:
        # [T]
        return score_only(
            model, batch.token_ids, batch.labels, batch.layout, self.temperature, batch.scored
        )

    def pack_minibatch(self, groups: Sequence[Group[Episode]]) -> _MiniBatch:
        """Plan and pack the groups of one optimizer step."""
        loss = self.algorithm.policy_loss
        forward_only: list[Item] = []
        learning: list[Item] = []
        for item in items_of(groups, whole_groups=loss.whole_groups):
            if all(self.algorithm.zero_gradient(member.episode) for member in item):
                forward_only.append(item)
            else:
                learning.append(item)
        without_backward = self._plan(forward_only)
        with_backward = self._plan(learning)
        plan: Plan = []
        for rank in range(self.dp_size):
            # An empty micro-batch if there is nothing to learn: AdamW needs a gradient, even of zeros, on every rank.
            plan.append(without_backward[rank] + (with_backward[rank] or [[]]))
        batches = self._pack(
            plan,
            groups,
            share_prompts=self.shares_prompts,
            sequence_columns=loss.sequence_columns,
            token_columns=loss.token_columns,
        )
        return _MiniBatch(plan, len(without_backward[0]), batches)

    def _plan(self, items: list[Item]) -> Plan:
        """Divide items over ranks and micro-batches. Warns once of an item that is over the token budget."""
        budget = self.config.max_tokens_per_microbatch
        largest = max(items, key=num_tokens, default=[])
        if num_tokens(largest) > budget and not self._warned_of_size:
            self._warned_of_size = True
            kind = "group" if len(largest) > 1 else "sequence"
            progress(
                f"trainer.max_tokens_per_microbatch {budget}: the {kind} of {largest[0].name} has "
                f"{num_tokens(largest)} tokens and cannot be split, so its micro-batch takes more memory"
            )
        _, without_attention = self._model_spec.model.get_nparams_and_flops(self.model, 0)
        _, with_attention = self._model_spec.model.get_nparams_and_flops(self.model, 1)
        cost = with_attention / without_attention - 1
        return plan_microbatches(
            items, num_ranks=self.dp_size, max_tokens=budget, attention_cost=cost
        )

    def _pack(
        self,
        plan: Plan,
        groups: Sequence[Group[Episode]],
        *,
        share_prompts: bool,
        sequence_columns: Sequence[str] = (),
        token_columns: Sequence[str] = (),
    ) -> list[TrainBatch]:
        """Returns this rank's micro-batches, with these columns of the credit."""
        normalizers = self.algorithm.normalizers(groups)
        return [
            pack(
                members,
                normalizers=normalizers,
                multiple=self.pad_multiple,
                share_prompts=share_prompts,
                sequence_columns=sequence_columns,
                token_columns=token_columns,
            )
            for members in plan[self.dp_rank]
        ]

    def _count_work(self, minibatches: list[_MiniBatch]) -> _Counts:
        """Returns the work of all ranks in one pass."""
        counts = _Counts([0] * self.dp_size, np.zeros(3), np.zeros(3))
        for minibatch in minibatches:
            for rank, microbatches in enumerate(minibatch.plan):
                for i, members in enumerate(microbatches):
                    work = np.array(count_work(members, share_prompts=self.shares_prompts))  # [3]
                    counts.rank_tokens[rank] += int(work[0])
                    counts.forward += work
                    if i >= minibatch.num_forward_only:
                        counts.backward += work
        return counts

    def _sum(self, value: float) -> float:
        """Returns the sum over data-parallel ranks."""
        if self.dp_group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=DEVICE_TYPE)  # 0-d
        dist.all_reduce(tensor, group=self.dp_group)
        return float(tensor)


def _comparison(divergence: Tensor, best: Tensor) -> Tensor:
    """Returns two [T] tensors as one, [2, T] float64, so that the host waits for both at once."""
    return torch.stack([divergence.detach().double(), best.double()])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors on the host, for which it waits once, in their dtypes (float32 or float64)."""
    if not tensors:
        return []
    flat = torch.cat([t.detach().double().flatten() for t in tensors]).cpu()  # [elements of all]
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
