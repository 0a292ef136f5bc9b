"""`RunConfig`: every field of a run, the controller's and those of what serves it."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro
from torchtitan.config import CommConfig
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.core.controller import Controller
from torchtitan_rl.library.environments.factory import Conversations
from torchtitan_rl.library.prompts.stream import PromptStream
from torchtitan_rl.library.task import Task
from torchtitan_rl.observability.recorder import Recorder
from torchtitan_rl.resilience.board import WatchdogLimits
from torchtitan_rl.resilience.checkpointer import Checkpointer


@dataclass(kw_only=True, slots=True)
class RunConfig(Controller.Config):
    """What a function in configs/ returns."""

    model_spec: Annotated[ModelSpec | None, tyro.conf.Suppress] = None

    hf_assets_path: str = ""
    """Hugging Face checkpoint folder (config.json, tokenizer, safetensors) that the policy starts from, or a name on the
    hub such as Qwen/Qwen3-0.6B. Empty: the task's own start, where it makes one (the debug configs)."""

    dump_folder: str = ""
    """The run's folder: logs, metrics, samples, checkpoints. Empty: a new one under outputs/."""

    resume: str = "auto"
    """auto: go on from the newest good checkpoint in the run's folder, if it has any; never: only a new run; a number:
    from that step; a folder: fork another run, or one of its checkpoints, into this new folder."""

    resume_changed: bool = False
    """Resume although model, task, seed, batch, algorithm or the optimizer's kind are not the checkpoint's."""

    eval_only: bool = False
    """Evaluate the start, or the last checkpoint of dump_folder, print the results and end without training."""

    task: Task.Config | None = None
    prompts: PromptStream.Config = field(default_factory=PromptStream.Config)
    conversations: Conversations.Config = field(default_factory=Conversations.Config)
    checkpoint: Checkpointer.Config = field(default_factory=Checkpointer.Config)
    metrics: Recorder.Config = field(default_factory=Recorder.Config)
    watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)

    comm: CommConfig = field(default_factory=lambda: CommConfig(trace_buf_size=0, init_timeout_seconds=1800))
    """init_timeout_seconds is the longest that a rank waits for the others, in the whole run: more than the slowest
    replica's generation and rewards."""
