"""Rehearses the trainer: build, sync, probe, reference, update and checkpoint of one rank of any layout."""

import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.gpu_rehearsal import cuda, machine  # first: before torch

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import _disable_current_modes
from torchtitan.distributed.utils import set_spmd_backend

from tests.gpu_rehearsal.device import Collective, Device, recording
from tests.gpu_rehearsal.experts import even_routing
from tests.gpu_rehearsal.places import place
from tests.gpu_rehearsal.push import connected
from tests.gpu_rehearsal.steps import scored_group
from tests.gpu_rehearsal.wire import Wire
from torchtitan_rl import comm
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.build import trainer_of_run
from torchtitan_rl.config import RunConfig
from torchtitan_rl.models import attention
from torchtitan_rl.models.experts import mixtures
from torchtitan_rl.models.hf import exported_rows, hf_weights, local_shard
from torchtitan_rl.models.lora.adapters import adapter_rows
from torchtitan_rl.models.score import HeadReader, TokenScores, attention_masks
from torchtitan_rl.run.checkpointer import policy_state
from torchtitan_rl.run.memory import memory_need, teacher_spec
from torchtitan_rl.sync import in_process
from torchtitan_rl.sync.shard_checksums import ShardChecksums
from torchtitan_rl.trainer import host_adamw, packing
from torchtitan_rl.trainer import model_loader as loader_module
from torchtitan_rl.trainer import trainer as trainer_module
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.frozen_models import Reference
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher
from torchtitan_rl.trainer.trainer import Trainer
from torchtitan_rl.types import TrainBatch
from torchtitan_rl.validation import check_model, validate

DTensor._op_dispatcher._random_ops.clear()  # the device has no random generator


class Layout(NamedTuple):
    """The ranks of a run."""

    world: int
    tp: int = 1
    replicate: int = 1
    ep: int = 1

    def __str__(self) -> str:
        degrees = {"TP": self.tp, "HSDP": self.replicate, "EP": self.ep}
        kinds = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " x ".join([f"{self.world} ranks", *kinds])


@dataclass
class Rehearsal:
    """What one rank of a run asked of its device."""

    rank: int
    collectives: list[Collective] = field(default_factory=list)
    timeouts: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Ranks of each process group -> seconds."""
    timeout: float = 0.0
    """The configured seconds."""
    operators: dict[str, Counter[str]] = field(default_factory=dict)
    """Phase -> how often each operator was launched."""
    syncs: Counter[str] = field(default_factory=Counter)
    """Where the host waited for the device in the last update, by line."""
    routing_waits: int = 0
    """Times that the host may wait in the last update for what a mixture's routers chose: before each exchange of tokens, and for
    the metrics."""
    layers: int = 0
    elements: int = 0
    """Layers and elements of a model whose second push was counted; 0 with LoRA."""
    forwards: int = 0
    """Forwards of the last update."""
    optimizer_steps: int = 0
    """Optimizer steps of the last update."""
    in_update: Counter[str] = field(default_factory=Counter)
    """Collectives of the last update."""
    races: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    """Phase -> bytes at its peak."""
    predicted: dict[str, float] = field(default_factory=dict)
    """The same by run/memory.py, without CUDA's own memory and the engine's."""
    differing: list[str] = field(default_factory=list)
    """Inputs of the update that differ from those that a CPU computes."""


def on_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """Sets the config's degrees and returns it."""
    parallelism = config.trainer.parallelism
    parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree = layout.tp, layout.replicate
    parallelism.expert_parallel_degree = layout.ep
    return config


def rehearse(
    config: RunConfig, layout: Layout, rank: int, *, prompts: int, longest: int, updates: int = 2
) -> Rehearsal:
    """Run one rank on `prompts` prompts with 4 completions of up to `longest` tokens. Raises whatever the product raises.

    The second update has the highest peak: the optimizer's moments exist only from the first on.
    """
    record, device = Rehearsal(rank), Device()
    algorithm = validate(config, world_size=layout.world)
    check_model(config, world_size=layout.world)
    need = memory_need(config, algorithm, world_size=layout.world, gpu_bytes=machine.TOTAL_BYTES)
    record.predicted = {
        "sync": sum(need.awake.values()) - need.awake.get("engine", 0) - need.awake["CUDA"],
        "update": sum(need.updating.values()) - need.updating.get("engine", 0) - need.updating["CUDA"],
    }
    record.timeout = config.comm.init_timeout_seconds
    with _ranks(layout, config, record), recording(device), _pretended_values(device, record), even_routing(device):
        rng = np.random.default_rng(0)
        sizes = {"prompt": (30, 60), "lengths": (longest // 2, longest + 1), "recorded": _recorded(config)}
        groups = draft_episodes([scored_group(rng, i, rewards=[0.0, 1.0] * 2, **sizes) for i in range(prompts)])
        with cuda.FakeCuda(allow_non_fake_inputs=True), device:
            _run(config, device, record, groups, updates)
    record.collectives, record.races = device.collectives, device.memory.races
    return record


def _run(config: RunConfig, device: Device, record: Rehearsal, groups: list, updates: int) -> None:
    def phase(name: str) -> None:
        record.peaks[name], record.operators[name] = device.memory.peak, device.operators.copy()
        device.memory.peak = device.memory.now
        device.operators.clear()

    set_spmd_backend(config.trainer.parallelism.spmd_backend)
    algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    trainer = trainer_of_run(config, algorithm)
    sources = [Reference(trainer)] if algorithm.needs_reference else []
    teacher = None
    if algorithm.policy_loss.divergence_beta is not None:
        teacher = ExactTeacher(trainer, trainer.loader.frozen(teacher_spec(config), Path(config.teacher)))
    elif algorithm.policy_loss.needs_teacher:
        sources.append(Teacher.of_folder(trainer, teacher_spec(config), Path(config.teacher)))
    phase("build")
    whole_blocks = trainer.parallel_dims.dp_shard > 1
    weights = partial(hf_weights, trainer.model, trainer.state_dict_adapter, torch.bfloat16, whole_blocks=whole_blocks)
    for _ in weights():
        pass
    trainer.token_logprobs(np.arange(5, 60))
    phase("start")
    for source in sources:
        source.add_logprobs(groups)
    trainer.algorithm.credit.assign(groups)
    record.differing = _differing(trainer, groups, device)
    phase("reference")
    before = len(device.collectives)
    for _ in range(updates):
        device.syncs.clear()
        device.operators.clear()
        device.exchanges = 0
        record.forwards, before = 0, len(device.collectives)
        report = trainer.update(groups, teacher)
        for moments in (state for one in trainer.optimizer for state in one.state.values()):
            for moment in moments.values():  # DTensor makes them where the device does not see it
                if moment.device.type == "cuda":
                    device.memory.use(local_shard(moment), "")
        record.optimizer_steps = report.optimizer_steps
        record.syncs = device.syncs.copy()
        record.routing_waits = device.exchanges + any(True for _ in mixtures(trainer.model))
    record.in_update = Counter(one.operator for one in device.collectives[before:])
    phase("update")
    if trainer.lora:
        for name, tensor in weights():
            assert tensor.device.type == "cuda", name
        for rows in (exported_rows, adapter_rows):
            ShardChecksums(rows(trainer.model, trainer.state_dict_adapter)).checksums(torch.bfloat16)
    else:
        sync = connected(trainer, config.generator.tensor_parallel_degree)
        record.predicted["sync"] += sum(p.nbytes for p in sync._engine._model.parameters())
        sync.push(policy_version=0)
        device.operators.clear()
        sync.push(policy_version=1)
        record.layers = len(trainer.model.layers)
        record.elements = sum(rows * columns for rows, columns in sync._policy.shapes.values())
        del sync
    phase("sync")
    wire, sent = Wire(), {name: (tensor.shape, tensor.dtype) for name, tensor in weights()}
    with wire.link(0) as sends:
        sends.send([dict(weights())])
    with wire.link(1) as receives:
        assert {name: (t.shape, t.dtype) for block in receives.receive() for name, t in block.items()} == sent
    phase("link")
    state = policy_state(trainer.model) | trainer.optimizer.state_dict()
    on_host = [n for n, t in state.items() if isinstance(t, Tensor) and t.device.type != "cuda"]
    moments = [n for n in state if ".exp_avg" in n] if config.trainer.optimizer.on_host is True else []
    assert on_host == moments, f"not in the memory where the config has it: {[*{*on_host} ^ {*moments}][:3]}"
    phase("checkpoint")


def _differing(trainer: Trainer, groups: list, device: Device) -> list[str]:
    """Names the inputs of this rank's micro-batches whose values on the device differ from those that a CPU computes."""

    def inputs(batch: TrainBatch) -> dict[str, Tensor]:
        named = {f.name: getattr(batch, f.name) for f in fields(batch)}
        masks = attention_masks(trainer.model, batch.layout)
        if isinstance(masks, BlockMask):
            masks = {f"masks.{i}": part for i, part in enumerate(masks.as_tuple())}
        else:
            masks = masks._asdict()
        named |= {f"layout.{f.name}": getattr(batch.layout, f.name) for f in fields(batch.layout)} | masks
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    on_device = [inputs(batch) for batch in trainer.batcher.minibatch(groups).batches]
    packing.DEVICE_TYPE = "cpu"
    try:
        with _disable_current_modes():
            on_cpu = [inputs(batch) for batch in trainer.batcher.minibatch(groups).batches]
    finally:
        packing.DEVICE_TYPE = "cuda"
    out = []
    for there, here in zip(on_device, on_cpu, strict=True):
        for name, value in there.items():
            true = device.true(value)
            with _disable_current_modes():
                if true is None or not torch.equal(true, here[name]):
                    out.append(name)
    return sorted(set(out))


@contextmanager
def _ranks(layout: Layout, config: RunConfig, record: Rehearsal):  # noqa: ANN202
    """This process is one rank of `layout`. Collectives return at once."""
    rank, start = record.rank, dist.init_process_group
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(layout.world)}

    def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
        record.timeouts[tuple(dist.get_process_group_ranks(group))] = timeout.total_seconds()

    def init_process_group(backend: str, *, timeout: timedelta, **_: object) -> None:
        assert backend == "cuda:nccl,cpu:gloo", backend
        start("fake", rank=rank, world_size=layout.world)
        set_timeout(dist.group.WORLD, timeout)

    torch.distributed.init_process_group, dist.ProcessGroup.set_timeout = init_process_group, set_timeout
    try:
        comm.init_process_group(config.comm)
        yield
    finally:
        torch.distributed.init_process_group = start
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _pretended_values(device: Device, record: Rehearsal):  # noqa: ANN202
    """Replaces what needs weights' values or another rank's: loading a checkpoint, log-probabilities, the gradient's norm, lists
    of other ranks."""
    teacher_reader = ExactTeacher.reader
    own_score, clip = trainer_module.score, trainer_module.clip_grad_norm_

    def score(*args: object, **kwargs: object) -> TokenScores:
        record.forwards += 1
        scores = own_score(*args, **kwargs)
        tensors = scores.logprobs, scores.entropy, *scores.columns.values()
        for tensor, value in zip(tensors, (-1.0, 1.0, 0.5, 7)):
            with _disable_current_modes():
                tensor._true = torch.full(tuple(tensor.shape), value, dtype=tensor.dtype)
        return scores

    def counted(*args: object) -> HeadReader:
        record.forwards += 1
        return teacher_reader(*args)

    def all_gather_lists(mine: list) -> list:
        ranks = tuple(range(dist.get_world_size()))
        device.collectives.append(Collective("all_gather_lists", ranks, (), place(), False))
        return mine

    def clip_grad_norm_(*args: object, **kwargs: object) -> Tensor:
        norm = clip(*args, **kwargs)
        with _disable_current_modes():
            norm._true = torch.ones(())
        return norm

    with (
        mock.patch.multiple(trainer_module, score=score, clip_grad_norm_=clip_grad_norm_),
        mock.patch.object(ExactTeacher, "reader", counted),
        mock.patch.object(loader_module, "load_hf_weights"),
        mock.patch.multiple(attention, create_attention_mask=create_block_mask, _compiled_flex=_flex_kernels),
        mock.patch.object(in_process, "num_cached_blocks", return_value=0),
        mock.patch.object(host_adamw, "BUCKET_BYTES", 2**25),  # several of a small model
        mock.patch.object(comm, "all_gather_lists", all_gather_lists),
    ):
        yield


class _FlexKernels(torch.autograd.Function):
    """The tensors that FlexAttention's generated kernels read and write: one forward, and two launches of the backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ANN001
        """q [1, N, T, H], k and v [1, Nkv, T, H] -> [1, N, T, H]"""
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        q, k, v, out, lse = ctx.saved_tensors
        (grad * out).sum(-1, dtype=torch.float32)  # [1, N, T]
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _flex_kernels(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, **_: object) -> Tensor:
    assert block_mask.shape[-2:] == (q.shape[-2], k.shape[-2])
    return _FlexKernels.apply(q, k, v)


def _recorded(config: RunConfig) -> int:
    """Experts that the engine records of each token."""
    layers = config.model_spec.model.layers if config.generator.router_replay else ()
    return sum(layer.moe.router.top_k for layer in layers)
