"""Resolves the relative paths that a config function sets, from the folder of its file. Those of the command line are the caller's."""

import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.common.field_limits import parts
from torchtitan_rl.library.references import in_folder
from torchtitan_rl.setup.own_sinks import sink_in_folder

if TYPE_CHECKING:
    from torchtitan_rl.setup.run_config import RunConfig

_NAMES = re.compile(r"(^|_)(paths?|files?|folders?)$")
"""The names of a task's fields that are paths."""


def resolve_from(folder: Path, config: "RunConfig") -> None:
    """Make the paths that exist in `folder` absolute: of the start, rewards, sinks and the task. Others stay as they are."""
    config.hf_assets_path = _resolved(folder, config.hf_assets_path)
    config.teacher = in_folder(folder, _resolved(folder, config.teacher))
    config.more_teachers = _resolved(folder, config.more_teachers)
    config.teacher_hint = in_folder(folder, config.teacher_hint)
    config.resume = _resolved(folder, config.resume)
    config.prompts.demonstrate = in_folder(folder, config.prompts.demonstrate)
    config.grader.rewards = [in_folder(folder, reference) for reference in config.grader.rewards]
    config.metrics.sinks = [sink_in_folder(folder, text) for text in config.metrics.sinks]
    if config.task is not None:
        _resolve_task(folder, config.task)


def _resolve_task(folder: Path, task: Any) -> None:
    for field in fields(task):
        value = getattr(task, field.name)
        if field.name == "warm_start":
            task.warm_start = in_folder(folder, value)
        elif _NAMES.search(field.name):
            setattr(task, field.name, _resolved(folder, value))
        for _, part in parts(value):
            if is_dataclass(part) and not isinstance(part, type):  # a member of a mixture
                _resolve_task(folder, part)


def _resolved(folder: Path, value: Any) -> Any:
    """The value with `folder` before each text, or text in a list or dict, that is the name of something in it."""
    if isinstance(value, dict):
        return {key: _resolved(folder, entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(folder, entry) for entry in value]
    there = isinstance(value, str) and value != "" and os.path.exists(folder / os.path.expanduser(value))
    return str(folder / os.path.expanduser(value)) if there else value
