"""Decides all that a config leaves open, before anything is built: what is "auto", which folder a name means, which model it holds.

The config that a user gave stays as it is. A run, a dry run and a loop of one's own work with the resolved copy.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl.build.auto_dtype import choose_dtypes, describe_choice
from torchtitan_rl.build.grader_parts import find_scorers
from torchtitan_rl.build.memory import (
    choose_by_memory,
    gpu_memory,
    gpu_memory_bytes,
)
from torchtitan_rl.build.start_checkpoint import load_tokenizer, prepare_start
from torchtitan_rl.build.task_parts import build_task
from torchtitan_rl.build.teacher_folder import prepare_teacher
from torchtitan_rl.build.validation import check_model, check_task, validate
from torchtitan_rl.data.task import Task

if TYPE_CHECKING:
    from torchtitan_rl.config import RunConfig
    from torchtitan_rl.rewards.grader import Scorers


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a config means on this machine, with the task that was built to check it."""

    config: "RunConfig"
    """The config with nothing left open: no "auto", local folders, the model's architecture."""
    task: Task
    scorers: "dict[str, Scorers]"
    """See `rewards.find_scorers`."""
    dtype_choice: str
    """A line with the dtype of "auto"; "" without one."""
    memory: str
    """A line with the memory of a GPU that is needed and there is; "" without a GPU."""


def resolve(config: "RunConfig", *, world_size: int) -> Resolved:
    """Check the config, the quickest checks first, make or download the policy's start and the teacher, and choose what is "auto".

    Raises:
        UserError: naming the field, the value, what was expected and the remedy.
    """
    config = copy.deepcopy(config)
    dtype_choice = describe_choice(config)
    config.generator.dtype, config.trainer.mixed_precision_param = choose_dtypes(config).values()
    validate(config, world_size=world_size)
    task = build_task(config.task)
    teaches = bool(config.teacher or config.teacher_hint)
    scorers = find_scorers(
        config.grader,
        task,
        required=config.samples_training,
        only_watched=teaches or config.eval_only or not config.samples_training,
    )
    check_task(config, task)
    prepare_start(config)
    check_model(config, world_size=world_size)
    if config.teacher:
        prepare_teacher(config, load_tokenizer(config.hf_assets_path))
        check_model(config, world_size=world_size)  # with the teacher's memory
    gpu_bytes = gpu_memory_bytes()
    config.trainer.activation_checkpoint, config.generator.sleep = choose_by_memory(
        config, world_size=world_size, gpu_bytes=gpu_bytes
    )
    memory = ""
    if gpu_bytes is not None:
        memory = gpu_memory(config, world_size=world_size, gpu_bytes=gpu_bytes)
    return Resolved(
        config=config, task=task, scorers=scorers, dtype_choice=dtype_choice, memory=memory
    )
