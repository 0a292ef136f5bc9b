"""Builds what a training loop calls, in the order in which the parts need each other.

    with closing(build_parts(config)) as parts:
        parts.weight_sync.push(policy_version=0)
        for group in parts.generator.generate(parts.prompts.next_batch(16), step=1): ...

`train.py` builds a run on these parts; `examples/grpo_minimal.py` is a loop of one's own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from torchtitan_rl import comm, events
from torchtitan_rl.build.grader_parts import build_grader
from torchtitan_rl.build.memory import teacher_spec
from torchtitan_rl.build.node import check_environment
from torchtitan_rl.build.rank_variables import be_only_rank
from torchtitan_rl.build.resolve import Resolved, resolve
from torchtitan_rl.build.start_checkpoint import load_tokenizer
from torchtitan_rl.build.task_parts import build_prompts
from torchtitan_rl.generator.demonstrations import NoEngine
from torchtitan_rl.generator.engine_stats import EngineStats
from torchtitan_rl.generator.start import start_generator
from torchtitan_rl.models import spec_from_folder
from torchtitan_rl.models.hf_decoder import longest_window
from torchtitan_rl.models.lora.adapters import Lora
from torchtitan_rl.models.multimodal import engine_folder
from torchtitan_rl.models.shard_checksums import ShardChecksums
from torchtitan_rl.sync.lora_engine import EngineAdapter
from torchtitan_rl.sync.weight_proof import WeightProof
from torchtitan_rl.trainer.build_trainer import build_trainer
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
from torchtitan_rl.trainer.teachers.frozen_models import PolicyAverage, Reference
from torchtitan_rl.trainer.teachers.hints import Hints
from torchtitan_rl.trainer.teachers.sampled_teacher import Teacher, Teachers

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
    from torchtitan_rl.rewards.grader import Grader
    from torchtitan_rl.sync.weight_sync import WeightSync
    from torchtitan_rl.trainer.trainer import Trainer
    from torchtitan_rl.types import IntArray, Prompt


PROBE_TOKENS = 128
"""Fewest tokens of the sequence by which trainer and engine are compared, if max_model_len has room."""


@dataclass(kw_only=True, slots=True)
class PolicySync:
    """The weight sync of one policy with one engine."""

    sync: "WeightSync"
    trainer: "Trainer"
    generator: "Generator"
    probe: "IntArray"
    """[L] the tokens by which trainer and engine are compared."""

    def push(self, *, policy_version: int) -> int:
        """Push the policy after step `policy_version` into the engine, and verify it there. Returns the bytes sent. Collective."""
        generator = self.generator
        return self.sync.push(
            self.trainer.hf_weights(generator.dtype, adapters_only=generator.holds_base),
            generator,
            policy_version=policy_version,
            probe=self.probe,
            trainer_logprobs=self.trainer.token_logprobs,
        )

    def evidence(self) -> str:
        """See `WeightSync.evidence`. Collective."""
        return self.sync.evidence(self.generator)


@dataclass(kw_only=True, slots=True)
class Parts:
    """The parts that a training loop calls. Every rank has its own and calls them in the same order."""

    config: "RunConfig"
    """The resolved config."""
    tokenizer: "PreTrainedTokenizerBase"
    prompts: "PromptStream"
    held_out: "list[Prompt]"
    """The prompts of evaluations, at least one."""
    grader: "Grader"
    algorithm: "Algorithm"
    trainer: "Trainer"
    sources: "list[Source]"
    """What scores episodes before `algorithm.credit.assign`: the reference, if the algorithm needs it, the teacher of a loss that
    reads its log-probabilities, and the loss's own."""
    teacher: "ExactTeacher | None"
    """From which the loss reads a divergence: the second argument of `trainer.update`."""
    generator: "Generator | NoEngine"
    weight_sync: "PolicySync | None"
    """Pushes the policy into the engine, which needs it before it samples; None without an engine."""

    def close(self) -> None:
        """Stop the reward functions' workers and the engine, then the process group that it uses."""
        self.grader.close()
        self.generator.close()
        comm.close_process_group()


def prepare(config: "RunConfig") -> Resolved:
    """Check this machine, resolve the config on it, and join the other ranks. Raises UserError as `resolve`."""
    check_environment()
    resolved = resolve(config, world_size=int(os.environ["WORLD_SIZE"]))
    if resolved.dtype_choice:
        events.progress(resolved.dtype_choice)
    if resolved.memory:
        events.progress(resolved.memory)
    with events.heartbeat("start"), events.timed("wait for the other ranks"):
        comm.init_process_group(config.comm)
    return resolved


def build_parts(
    config: "RunConfig", resolved: Resolved | None = None, *, folder: Path = Path()
) -> Parts:
    """Build and connect the parts of a training loop. The engine sleeps, with empty weights, until the first push. Collective.

    Args:
        resolved: from `prepare`; None: resolved here.
        folder: where the trainer writes what torchtitan dumps for debugging.

    Raises:
        UserError: as `prepare`, and if parts do not fit each other.
    """
    if resolved is None:
        be_only_rank()
        resolved = prepare(config)
    config, task = resolved.config, resolved.task
    set_spmd_backend(config.trainer.parallelism.spmd_backend)
    tokenizer = load_tokenizer(config.hf_assets_path)
    # First of all: it forks, and the others start threads.
    grader = build_grader(config.grader, task, resolved.scorers)
    prompts, held_out, environments = build_prompts(config, task, tokenizer)
    algorithm = config.algorithm.build(max_completion_tokens=config.sampling.max_tokens)
    with events.phase(
        f"build and shard the policy ({config.model_spec.name} {config.model_spec.flavor})"
    ):
        trainer = trainer_of_run(config, algorithm, folder)
        sources: list[Source] = [Reference(trainer)] if algorithm.needs_reference else []
        teaching, teacher = _build_teacher(config, trainer, prompts)
        sources += teaching
        sources += algorithm.policy_loss.sources(trainer)
    generator, weight_sync = NoEngine(), None
    if config.needs_engine:
        with events.phase("start the vLLM engine"):
            generator = _build_generator(config, tokenizer, environments, trainer.lora)
        proof = WeightProof.of(generator, ShardChecksums(trainer.model, trainer.state_dict_adapter))
        sync = config.weight_sync.build(
            proof=proof, policy=trainer.model, dtypes=set(config.dtypes.values())
        )
        weight_sync = PolicySync(
            sync=sync, trainer=trainer, generator=generator, probe=_probe(config, held_out[0])
        )
        generator.sleep()  # loading the optimizer's state needs the engine's memory
    return Parts(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        grader=grader,
        algorithm=algorithm,
        trainer=trainer,
        sources=sources,
        teacher=teacher,
        generator=generator,
        weight_sync=weight_sync,
    )


def _build_teacher(
    config: "RunConfig", trainer: "Trainer", prompts: "PromptStream"
) -> "tuple[list[Source], ExactTeacher | None]":
    """Load the teacher that the loss asks for. Returns what scores the episodes for it. Collective."""
    loss = trainer.algorithm.policy_loss
    if not loss.needs_teacher:
        return [], None
    hints = (
        Hints(config.teacher_hint, prompts, config.generator.max_model_len)
        if config.teacher_hint
        else None
    )
    folder: Path | Decoder = Path(config.teacher or config.hf_assets_path)
    sources: list[Source] = [hints] if hints else []
    if config.teaches_itself and config.teacher_rate == 1:
        folder = trainer.model
    elif config.teaches_itself and config.teacher_rate > 0:
        average = PolicyAverage(trainer, config.teacher_rate)
        sources.append(average)
        folder = average.model
    if loss.divergence_beta is None:
        teachers = {"": Teacher(trainer, teacher_spec(config), folder, hints)}
        for name, more in config.more_teachers.items():
            teachers[name] = Teacher(trainer, spec_from_folder(Path(more)), Path(more), hints)
        sources.append(Teachers(teachers) if config.more_teachers else teachers[""])
        return sources, None
    return sources, ExactTeacher(trainer, teacher_spec(config), folder, hints)


def _probe(config: "RunConfig", prompt: "Prompt") -> "IntArray":
    """Returns the prompt's tokens, repeated to be longer than every sliding window, so that a wrong window shows.

    Repeated text is predicted from far behind, so a wrong rotary base shows.
    """
    ids = prompt.token_ids
    length = max(PROBE_TOKENS, longest_window(config.model_spec.model) + len(ids))
    return np.resize(ids, min(length, config.generator.max_model_len - 1))


def trainer_of_run(config: "RunConfig", algorithm: "Algorithm", folder: Path) -> "Trainer":
    """Build the trainer and give its process groups the run's timeout. Collective."""
    dims = ParallelDims.from_config(config.trainer.parallelism, dist.get_world_size())
    trainer = build_trainer(
        config.trainer,
        model_spec=config.model_spec,
        hf_assets_path=config.hf_assets_path,
        parallel_dims=dims,
        algorithm=algorithm,
        num_steps=config.num_steps,
        max_model_len=config.generator.max_model_len,
        temperature=config.sampling.temperature,
        generator_dtype=config.generator.dtype,
        dump_folder=str(folder),
        policy_lora=Lora.of(config.trainer.lora),
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
    engine = {"tp_size": tp_size, "dtype": TORCH_DTYPE_MAP[config.generator.dtype]}
    model = config.model_spec.model
    with engine_folder(
        config.hf_assets_path, model.hf if getattr(model, "part_of", "") else None
    ) as folder:
        generator = start_generator(
            config.generator,
            hf_assets_path=folder,
            tokenizer=tokenizer,
            sampling=config.sampling,
            seed=config.seed,
            environments=environments,
            stats=EngineStats(),
            lora=EngineAdapter(lora, **engine) if lora else None,
            records_kept=records_kept,
            tool_call_parser=config.conversations.tool_call_parser,
        )
    if tp_size > 1:
        from vllm.distributed.parallel_state import get_tp_group

        _set_timeouts(config, [get_tp_group().device_group, get_tp_group().cpu_group])
    return generator


def _set_timeouts(config: "RunConfig", groups: "Sequence[ProcessGroup]") -> None:
    """Set comm.init_timeout_seconds, which otherwise rules the default group alone: NCCL's own is 10 minutes."""
    for group in groups:
        group.set_timeout(timedelta(seconds=config.comm.init_timeout_seconds))
