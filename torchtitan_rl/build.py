"""Builds a run: decides what the config leaves open, makes each drawer's part in order, and hands them to the controller.

    with closing(build_parts(config)) as parts:
        parts.weight_sync.push(policy_version=0)
        for group in parts.generator.generate(parts.prompts.next_batch(16), step=1): ...

It is the only order of the start: `command/train.py` calls `build_run`, the dry run `resolve`, a loop of one's own `build_parts`
(examples/grpo_minimal.py).
"""

import copy
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from torchtitan_rl import comm, events
from torchtitan_rl.algorithm.losses.optimal_baseline import LOG_COLLISIONS
from torchtitan_rl.algorithm.losses.sft import check_demonstrated
from torchtitan_rl.controller import Controller
from torchtitan_rl.data.end_tokens import end_token_ids, folder_end_token_ids
from torchtitan_rl.data.renderer import template_options
from torchtitan_rl.data.task import Task, build_task, may_answer
from torchtitan_rl.events import phase, progress
from torchtitan_rl.fields.references import caller_folder, tried
from torchtitan_rl.generator.demonstrations import Demonstrations, NoEngine
from torchtitan_rl.generator_rank import GeneratorRank
from torchtitan_rl.link import Link
from torchtitan_rl.models.hf_config import spec_from_folder
from torchtitan_rl.models.hf_decoder import HFDecoder, longest_window
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.multimodal import engine_folder
from torchtitan_rl.observe.evaluation_results import results_folder
from torchtitan_rl.observe.metrics.throughput import SplitNotice, TokenFlops
from torchtitan_rl.observe.observer import RankObserver, RunObserver
from torchtitan_rl.parts import Parts
from torchtitan_rl.rewards import Grader
from torchtitan_rl.rewards.find_scorers import find_scorers
from torchtitan_rl.rewards.workers import WorkerPool
from torchtitan_rl.run.auto_dtype import set_dtypes
from torchtitan_rl.run.checkpointer import Checkpointer
from torchtitan_rl.run.dump_folder import CHECKOUT
from torchtitan_rl.run.identity import described, repositories
from torchtitan_rl.run.memory import (
    choose_by_memory,
    describe_memory,
    gpu_memory_bytes,
    parameter_count,
    teacher_spec,
)
from torchtitan_rl.run.node import check_environment
from torchtitan_rl.run.resume import Resume, config_fields, prompts_date
from torchtitan_rl.run.run_folder import RunFolderCheck
from torchtitan_rl.run.secrets import without_secrets
from torchtitan_rl.run.start_checkpoint import (
    check_tokenizer,
    load_tokenizer,
    prepare_start,
    unlike_its_file,
)
from torchtitan_rl.run.teacher_folder import prepare_teachers
from torchtitan_rl.sampler import FarSampler, Sampler
from torchtitan_rl.state import RunState
from torchtitan_rl.sync.in_process import InProcess
from torchtitan_rl.sync.lora_engine import lora_options, lora_request
from torchtitan_rl.sync.other_ranks import OtherRanks
from torchtitan_rl.sync.weight_sync import WeightSync
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.frozen_models import Collisions, PolicyAverage, Reference
from torchtitan_rl.trainer.teachers.hints import Hints
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher, Teachers
from torchtitan_rl.types import Prompt
from torchtitan_rl.validation import check_model, longest_sequence, validate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torchtitan.models.common.decoder import Decoder
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.algorithm.losses.loss import Source
    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.data.stream import PromptStream
    from torchtitan_rl.environments.factory import Conversations
    from torchtitan_rl.generator.generator import Generator
    from torchtitan_rl.observe.recorder import Recorder
    from torchtitan_rl.rewards.scorer import Scorer
    from torchtitan_rl.trainer.trainer import Trainer
    from torchtitan_rl.types import IntArray


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a config means on this machine, with the task that was built to check it."""

    config: "RunConfig"
    """The config with nothing left open: no "auto", local folders, the model's architecture, the date of the prompts."""
    algorithm: "Algorithm"
    task: Task
    scorers: "dict[str, list[Scorer]]"
    """See `rewards.find_scorers.find_scorers`."""
    dtype_choice: str
    """A line with the dtype of "auto"; "" without one."""
    memory: str
    """A line with the memory that is needed and there is."""


def resolve(config: "RunConfig", *, world_size: int) -> Resolved:
    """Check the config, the quickest checks first, make or download the policy's start and the teacher, and choose what is "auto".

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    config = copy.deepcopy(config)
    dtype_choice = set_dtypes(config)
    config.prompts.date = prompts_date(config)
    algorithm = validate(config, world_size=world_size)
    config.generator.max_model_len = longest_sequence(config)
    config.evaluation = config.evaluation.like(config.sampling)
    task = build_task(config.task)
    config.task = getattr(task, "config", config.task)  # with what its data decides
    teaches = bool(config.teacher or config.teacher_hint)
    samples_training = algorithm.policy_loss.from_engine
    scorers = find_scorers(
        config.grader,
        task,
        required=samples_training,
        only_watched=teaches or config.eval_only or not samples_training,
    )
    prepare_start(config)
    check_model(config, world_size=world_size - config.generator.ranks)
    if config.teacher:
        prepare_teachers(config, algorithm, load_tokenizer(config.hf_assets_path))
    on = {"world_size": world_size - config.generator.ranks, "gpu_bytes": gpu_memory_bytes()}
    choose_by_memory(config, algorithm, **on)
    return Resolved(
        config=config,
        algorithm=algorithm,
        task=task,
        scorers=scorers,
        dtype_choice=dtype_choice,
        memory=describe_memory(config, algorithm, **on),
    )


PROBE_TOKENS = 128
"""Fewest tokens of the sequence by which trainer and engine are compared, if max_model_len has room."""


def prepare(config: "RunConfig") -> Resolved:
    """Check this machine, resolve the config on it, and join the other ranks, if torchrun has started any. Raises UserError as
    `resolve`."""
    comm.be_only_rank()
    check_environment()
    resolved = resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
    if resolved.dtype_choice:
        events.progress(resolved.dtype_choice)
    if gpu_memory_bytes() is not None:
        events.progress(resolved.memory)
    with events.heartbeat("start"), events.timed("wait for the other ranks"):
        comm.init_process_group(config.comm)
    return resolved


def build_parts(
    config: "RunConfig",
    resolved: Resolved | None = None,
    *,
    link: Link | None = None,
) -> Parts:
    """Build and connect the parts of a training loop. The engine sleeps, with empty weights, until the first push. Collective.

    Args:
        resolved: from `prepare`; None: resolved here.
        link: to generators on ranks of their own; None: each rank has its part of an engine.

    Raises:
        UserError: as `prepare`, and if parts do not fit each other.
    """
    resolved = resolved or prepare(config)
    config, algorithm = resolved.config, resolved.algorithm
    set_spmd_backend(config.trainer.parallelism.spmd_backend)
    tokenizer = load_tokenizer(config.hf_assets_path)
    grader, tool_workers = (None, None) if link else _build_workers(resolved)
    prompts, held_out, environments = build_prompts(resolved, tokenizer, tool_workers)
    millions = parameter_count(config.model_spec) / 1e6
    with events.phase(f"build the policy ({millions:,.1f} million parameters)"):
        trainer = trainer_of_run(config, algorithm)
        sources: list[Source] = [Reference(trainer)] if algorithm.needs_reference else []
        teaching, teacher = _build_teacher(config, trainer, prompts)
        sources += teaching
        if LOG_COLLISIONS in algorithm.policy_loss.reads:
            sources.append(Collisions(trainer))
    generator, weight_sync, connect = NoEngine(), None, None
    if link:
        connect = partial(OtherRanks, link)
    elif config.needs_engine(algorithm):
        with events.phase("start the vLLM engine"):
            generator = _build_generator(config, tokenizer, environments, trainer.lora)
        connect = partial(InProcess, generator)
    if connect:
        probe = _probe(config, held_out[0])
        weight_sync = WeightSync(config.weight_sync, trainer=trainer, connect=connect, probe=probe)
    generator.sleep()  # loading the optimizer's state needs the engine's memory
    return Parts(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        grader=grader,
        tool_workers=tool_workers,
        algorithm=algorithm,
        trainer=trainer,
        sources=sources,
        teacher=teacher,
        generator=generator,
        weight_sync=weight_sync,
    )


def _build_workers(resolved: Resolved) -> tuple[Grader, WorkerPool | None]:
    """Start the processes of reward functions and tools. First of all: they fork, and other parts start threads."""
    config, tool_workers = resolved.config, None
    grader = config.grader.build(scorers=resolved.scorers)
    if any(map(may_answer, resolved.task.members().values())):
        tool_workers = WorkerPool([operator.call], config.conversations.workers)
    return grader, tool_workers


def _build_teacher(
    config: "RunConfig", trainer: "Trainer", prompts: "PromptStream"
) -> "tuple[list[Source], ExactTeacher | None]":
    """Load the teacher that the loss asks for. Returns what scores the episodes for it. Collective."""
    loss = trainer.algorithm.policy_loss
    if not loss.needs_teacher:
        return [], None
    sources: list[Source] = []
    hints: Hints | None = None
    if config.teacher_hint:
        hints = Hints(config.teacher_hint, prompts, config.generator.max_model_len)
        sources.append(hints)
    own: Decoder | None = None
    if config.teaches_itself and config.teacher_rate == 1:
        own = trainer.model
    elif config.teaches_itself and config.teacher_rate > 0:
        average = PolicyAverage(trainer, config.teacher_rate)
        sources.append(average)
        own = average.model
    spec, folder = teacher_spec(config), Path(config.teacher or config.hf_assets_path)
    if loss.divergence_beta is not None:
        model = trainer.loader.frozen(spec, folder) if own is None else own
        return sources, ExactTeacher(trainer, model, hints)
    if own is not None:
        teacher = Teacher(trainer, own, hints)
    else:
        teacher = Teacher.of_folder(trainer, spec, folder, hints)
    if config.more_teachers:
        teachers = {"": teacher}
        for name, more in config.more_teachers.items():
            path = Path(more)
            teachers[name] = Teacher.of_folder(trainer, spec_from_folder(path), path, hints)
        teacher = Teachers(teachers)
    return [*sources, teacher], None


def _probe(config: "RunConfig", prompt: "Prompt") -> "IntArray":
    """Returns the prompt's tokens, repeated to be longer than every sliding window, so that a wrong window shows.

    Repeated text is predicted from far behind, so a wrong rotary base shows.
    """
    ids = prompt.token_ids
    length = max(PROBE_TOKENS, longest_window(config.model_spec.model) + len(ids))
    return np.resize(ids, min(length, config.generator.max_model_len - 1))


def trainer_of_run(config: "RunConfig", algorithm: "Algorithm") -> "Trainer":
    """Build the trainer and give its process groups the run's timeout. Collective."""
    dims = ParallelDims.from_config(config.trainer.parallelism, dist.get_world_size())
    trainer = config.trainer.build(
        model_spec=config.model_spec,
        hf_assets_path=config.hf_assets_path,
        parallel_dims=dims,
        algorithm=algorithm,
        num_steps=config.num_steps,
        max_model_len=config.generator.max_model_len,
        temperature=config.sampling.temperature,
        generator_dtype=config.generator.dtype,
        router_replay=config.generator.router_replay,
    )
    _set_timeouts(
        config, [mesh.get_group() for mesh in dims.get_all_one_dimensional_meshes().values()]
    )
    return trainer


def _build_generator(
    config: "RunConfig",
    tokenizer: "PreTrainedTokenizerBase",
    environments: "Conversations",
    lora: Lora | None,
) -> "Generator":
    tp_size = config.generator.tensor_parallel_degree
    records_kept = not config.generator.router_replay and (
        config.truncates or environments.may_answer
    )
    model = config.model_spec.model
    with engine_folder(
        config.hf_assets_path, model.hf if getattr(model, "part_of", "") else None
    ) as folder:
        generator = config.generator.build(
            hf_assets_path=folder,
            tokenizer=tokenizer,
            sampling=config.sampling,
            seed=config.seed,
            environments=environments,
            lora_options=lora_options(lora.config) if lora else None,
            lora_request=lora_request() if lora else None,
            records_kept=records_kept,
            tool_call_parser=config.conversations.tool_call_parser,
            norms_round_once=not isinstance(model, HFDecoder.Config),
        )
    if tp_size > 1:
        from vllm.distributed.parallel_state import get_tp_group

        _set_timeouts(config, [get_tp_group().device_group, get_tp_group().cpu_group])
    return generator


def _set_timeouts(config: "RunConfig", groups: "Sequence[ProcessGroup]") -> None:
    """Set comm.init_timeout_seconds, which otherwise rules the default group alone: NCCL's own is 10 minutes."""
    for group in groups:
        group.set_timeout(timedelta(seconds=config.comm.init_timeout_seconds))


def build_prompts(
    resolved: Resolved,
    tokenizer: "PreTrainedTokenizerBase",
    tool_workers: WorkerPool | None = None,
) -> "tuple[PromptStream, list[Prompt], Conversations]":
    """Build and check the stream of prompts, the held-out prompts and what answers in conversations. Needs the start's
    tokenizer, and none of its weights.

    Raises:
        UserError: if task, tokenizer, chat template and environments do not fit each other.
    """
    config, task = resolved.config, resolved.task
    check_tokenizer(tokenizer, config.model_spec.model.vocab_size)
    if said := unlike_its_file(tokenizer):
        progress(said)
    ends = end_token_ids(config.hf_assets_path, tokenizer)
    for end in set(ends).difference(folder_end_token_ids(config.hf_assets_path, tokenizer)):
        progress(
            f"{tokenizer.decode([end])!r} ends a turn too: the chat template ends an assistant's turn with it, and it is none "
            "of the end tokens of tokenizer, generation_config.json and config.json"
        )
    if config.prompts.apply_chat_template and "strftime_now" in str(tokenizer.chat_template):
        progress(
            f"the chat template writes the date: {config.prompts.date}, which stays the same if the run is resumed (prompts.date)"
        )
    longest = config.sampling.max_tokens
    options = {"end_token_ids": ends, "max_completion_tokens": longest}
    stream = tried(
        config.prompts, "build", task=task, tokenizer=tokenizer, seed=config.seed, **options
    )
    if not resolved.algorithm.policy_loss.from_engine:
        check_demonstrated(stream.at(0))
    evaluates = (
        config.evaluation.every or config.eval_only
    )  # otherwise one prompt, for the check of the weight sync
    held_out = tried(stream, "held_out", config.evaluation.num_prompts if evaluates else 1)
    if (epochs := stream.epoch(config.num_prompts_per_step) or 0) > 1:
        progress(
            f"num_prompts_per_step {config.num_prompts_per_step} is {epochs:.1f} x the task's prompts: a step repeats them"
        )
    environments = config.conversations.build(
        members=task.members(),
        tokenizer=tokenizer,
        end_token_ids=ends,
        template_options=template_options(config.prompts),
        worker_pool=tool_workers,
    )
    environments.check(held_out)
    return stream, held_out, environments


def build_run(
    config: "RunConfig",
    run_folder: Path,
    *,
    resolved: Resolved | None = None,
    resume: Resume | None = None,
    stop_requested: Callable[[], int] = lambda: 0,
) -> Controller | GeneratorRank:
    """Build and connect all parts of a run, and load its start or the checkpoint of `resume`. On a rank that only samples, build its
    program. Collective.

    Args:
        stop_requested: see `Controller`.
        resolved: from `prepare`; None: resolved here.
    """
    resolved = resolved or prepare(config)
    config, link = resolved.config, None
    if config.generator.ranks:
        link = Link(config.generator.ranks, timedelta(seconds=config.comm.init_timeout_seconds))
        if link.samples:
            return _build_generator_rank(resolved, link, run_folder, stop_requested)
    parts = build_parts(config, resolved, link=link)
    evaluation = config.evaluation.build()
    observer = _build_observer(config, parts, run_folder)
    sampler, sampling_state = _build_sampler(parts, observer, link)
    state = RunState(
        algorithm=parts.algorithm,
        recorder=observer.recorder,
        evaluation=evaluation,
        **sampling_state,
        logprob_gate=parts.trainer.gate,
    )
    checkpointer = _build_checkpointer(config, parts, state, run_folder)
    if resume is not None:
        with phase(f"load {resume.checkpoint}"):
            checkpointer.load(resume.checkpoint)
    if not config.eval_only:
        checkpointer.check_room()
    parts.trainer.after_load()
    return Controller(
        **vars(parts),
        sampler=sampler,
        evaluation=evaluation,
        state=state,
        observer=observer,
        checkpoints=checkpointer,
        stop_requested=lambda: max(stop_requested(), link.stopped if link else 0),
    )


def _build_sampler(
    parts: Parts, observer: RunObserver, link: Link | None
) -> tuple[Sampler | FarSampler, dict[str, Any]]:
    """Returns what samples a step's groups, and its parts of the run's state by name."""
    config, state, step_sampler = parts.config, {}, Demonstrations(parts.generator)
    if parts.algorithm.policy_loss.from_engine:
        step_sampler = config.in_flight.build(generator=parts.generator, stream=parts.prompts)
        state["in_flight"] = step_sampler
    if link is None:
        return Sampler(parts.generator, step_sampler, parts.grader, observer.keep), state
    record, ahead = observer.recorder.collector.add, config.generator.ahead > 0
    far = FarSampler(link, step_sampler, ahead=ahead, record=record)
    return far, {**state, "ahead": far}


def _gather(value: Any) -> list[Any] | None:
    """Returns every rank's value on rank 0, None on other ranks."""
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def _build_generator_rank(
    resolved: Resolved, link: Link, run_folder: Path, stop_requested: Callable[[], int]
) -> GeneratorRank:
    config, tokenizer = resolved.config, load_tokenizer(resolved.config.hf_assets_path)
    grader, tool_workers = _build_workers(resolved)
    prompts, _, environments = build_prompts(resolved, tokenizer, tool_workers)
    lora = Lora.of(config.trainer.lora)
    with phase("start the vLLM engine"):
        generator = _build_generator(config, tokenizer, environments, lora)
    observer = RankObserver(_build_recorder(config, tokenizer, run_folder))
    in_flight = config.in_flight.build(generator=generator, stream=prompts)
    sampler = Sampler(generator, in_flight, grader, observer.keep)
    return GeneratorRank(link, sampler, lora, observer, stop_requested)


def _build_recorder(
    config: "RunConfig", tokenizer: "PreTrainedTokenizerBase", run_folder: Path
) -> "Recorder":
    code, _ = repositories([CHECKOUT, caller_folder()])
    return config.metrics.build(
        run_folder=run_folder,
        run_name=run_folder.name,
        run_config={"code": code, **without_secrets(described(config))},
        total_steps=config.num_steps,
        rank=int(os.environ["RANK"]),
        gather=_gather if dist.get_world_size() > 1 else None,
        decode=tokenizer.decode,
    )


def _build_observer(config: "RunConfig", parts: Parts, run_folder: Path) -> RunObserver:
    own = config.generator
    return RunObserver(
        _build_recorder(config, parts.tokenizer, run_folder),
        algorithm=parts.algorithm,
        prompts=parts.prompts,
        token_flops=TokenFlops.of(config.model_spec.model, parts.trainer.model),
        results_folder=results_folder(run_folder, alone=config.eval_only),
        split_notice=SplitNotice(own, dist.get_world_size()) if own.ranks else None,
    )


def _build_checkpointer(
    config: "RunConfig", parts: Parts, state: RunState, run_folder: Path
) -> Checkpointer:
    averages = [source for source in parts.sources if isinstance(source, PolicyAverage)]
    return Checkpointer(
        config.checkpoint,
        trainer=parts.trainer,
        prompts=parts.prompts,
        run_state=state,
        run_folder=run_folder,
        config_fields=config_fields(config, parts.algorithm),
        check_folder=RunFolderCheck(run_folder),
        more_tensors=averages[0].tensors() if averages else None,
    )
