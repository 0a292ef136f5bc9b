"""Builds a whole run: the parts of its loop, what watches it, what saves it, and the controller that calls them.

`build_run(config, folder).run()` trains. `build.parts.build_parts` builds the loop's parts alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan_rl.build.parts import Parts, build_parts
from torchtitan_rl.build.resolve import Resolved
from torchtitan_rl.controller import Controller
from torchtitan_rl.events import phase
from torchtitan_rl.fields.references import caller_folder
from torchtitan_rl.generator.demonstrations import Demonstrations
from torchtitan_rl.observe.metrics.throughput import TokenFlops
from torchtitan_rl.observe.observer import RunObserver
from torchtitan_rl.observe.recorder import Recorder
from torchtitan_rl.run.checkpointer import Checkpointer
from torchtitan_rl.run.dump_folder import CHECKOUT
from torchtitan_rl.run.identity import described, repositories
from torchtitan_rl.run.resume import Resume, config_fields
from torchtitan_rl.run.run_folder import RunFolderCheck
from torchtitan_rl.run.secrets import without_secrets
from torchtitan_rl.state import RunState
from torchtitan_rl.trainer.teachers.frozen_models import PolicyAverage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.config import RunConfig


def build_run(
    config: "RunConfig",
    run_folder: Path,
    *,
    resolved: Resolved | None = None,
    resume: Resume | None = None,
    stop_requested: Callable[[], int] = lambda: 0,
) -> Controller:
    """Build and connect all parts of a run, and load its start or the checkpoint of `resume`. Collective.

    Args:
        stop_requested: see `Controller`.
        resolved: from `build.parts.prepare`; None: resolved here.
    """
    parts = build_parts(config, resolved, folder=run_folder)
    config = parts.config
    evaluation = config.evaluation.build()
    observer = _build_observer(config, parts, run_folder)
    step_sampler = Demonstrations(parts.generator, parts.prompts)
    if config.samples_training:
        step_sampler = config.in_flight.build(generator=parts.generator, stream=parts.prompts)
    state = RunState(
        algorithm=parts.algorithm,
        recorder=observer.recorder,
        evaluation=evaluation,
        in_flight=step_sampler,
        logprob_gate=parts.trainer.checks,
    )
    checkpointer = _build_checkpointer(config, parts, state, run_folder)
    if resume is not None:
        with phase(f"load {resume.checkpoint}"):
            checkpointer.load(resume.checkpoint)
    checkpointer.check_room()
    parts.trainer.check_loaded()
    return Controller(
        config,
        prompts=parts.prompts,
        held_out=parts.held_out,
        generator=parts.generator,
        step_sampler=step_sampler,
        grader=parts.grader,
        algorithm=parts.algorithm,
        sources=parts.sources,
        trainer=parts.trainer,
        teacher=parts.teacher,
        weight_sync=parts.weight_sync,
        evaluation=evaluation,
        state=state,
        observer=observer,
        checkpoints=checkpointer,
        stop_requested=stop_requested,
    )


def build_recorder(
    config: "RunConfig", tokenizer: "PreTrainedTokenizerBase", run_folder: Path
) -> Recorder:
    """Build what writes metrics and tables to the sinks."""
    code, _ = repositories([CHECKOUT, caller_folder()])
    return config.metrics.build(
        run_folder=run_folder,
        run_name=run_folder.name,
        run_config={"code": code, **without_secrets(described(config))},
        total_steps=config.num_steps,
        rank=dist.get_rank(),
        gather=_gather if dist.get_world_size() > 1 else None,
        decode=tokenizer.decode,
    )


def _gather(value: Any) -> list[Any] | None:
    """Returns every rank's value on rank 0, None on other ranks."""
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def _build_observer(config: "RunConfig", parts: Parts, run_folder: Path) -> RunObserver:
    return RunObserver(
        build_recorder(config, parts.tokenizer, run_folder),
        algorithm=parts.algorithm,
        prompts=parts.prompts,
        token_flops=TokenFlops.of(config.model_spec.model, parts.trainer.model),
        run_folder=run_folder,
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
        config_fields=config_fields(config),
        check_folder=RunFolderCheck(run_folder),
        more_tensors=averages[0].tensors() if averages else None,
    )
