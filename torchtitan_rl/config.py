"""`RunConfig`: all fields of a run's config. The functions in configs/ return one."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.config import CommConfig

from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.controller import Controller
from torchtitan_rl.data.stream import PromptStream
from torchtitan_rl.data.task import Task
from torchtitan_rl.environments.factory import Conversations
from torchtitan_rl.fields.number import number
from torchtitan_rl.generator.in_flight import InFlight
from torchtitan_rl.observe.recorder import Recorder
from torchtitan_rl.run.checkpointer_config import CheckpointerConfig
from torchtitan_rl.run.rank_status import WatchdogLimits
from torchtitan_rl.sync.sync_config import WeightSyncConfig


@dataclass(kw_only=True, slots=True)
class Communication(CommConfig):
    """torchtitan's settings of communication, with one timeout."""

    init_timeout_seconds: int = number(1800, above=0)
    """The longest time that a rank waits for the others, throughout the run. Set it above the time that the slowest replica needs for
    generation and rewards."""

    train_timeout_seconds: Annotated[int, tyro.conf.Suppress] = number(100, above=0)
    """torchtitan's, which nothing here reads."""

    trace_buf_size: int = number(0, least=0)
    """Communication operations that torch's flight recorder keeps. 0: none."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Controller.Config):
    """The config of a run."""

    model_spec: Annotated[Any, tyro.conf.Suppress] = None
    """The policy's architecture, a ModelSpec, which the start sets from the config.json of hf_assets_path."""

    hf_assets_path: str = ""
    """The policy's start: a Hugging Face checkpoint folder (config.json, tokenizer, safetensors), or a name on the hub such as
    Qwen/Qwen3-0.6B. Empty: the start that the task makes, if it makes one (the debug configs)."""

    teacher: str = ""
    """A model from which the loss Distill or ExactDistill learns: a Hugging Face checkpoint folder or a name on the hub, with
    the policy's vocabulary. Or a recipe that makes one on the task, as in task.warm_start. Empty: no teacher, or with teacher_hint
    the policy itself."""

    teacher_hint: str = ""
    """What the teacher reads after the question and the policy does not: a column of the rows, expected_answer, or a function of
    the group's samples such as torchtitan_rl.trainer.teachers.hints:feedback. Empty: nothing."""

    teacher_rate: float = number(0.05, least=0, most=1)
    """How fast a teacher that is the policy itself follows it: each step it moves by this share of the way. 0: it stays the start.
    1: it is the policy of the step."""

    more_teachers: dict[str, str] = field(default_factory=dict)
    """Further teachers by name, each for the rows whose column `teacher` has its name; the other rows have `teacher`. With the loss
    Distill."""

    dump_folder: str = ""
    """The run's folder for logs, metrics, samples and checkpoints. Empty: a new one under outputs/."""

    resume: str = "auto"
    """auto: continue from the newest whole checkpoint in the run's folder, if it has any. never: only start a new run. A number:
    continue from that step. A folder: fork another run, or one of its checkpoints, into this new folder."""

    resume_changed: bool = False
    """Resume although model, task, seed, batch, algorithm or kind of optimizer differ from the checkpoint's."""

    eval_only: bool = False
    """Evaluate the start, or the newest checkpoint in dump_folder, print the results and end without training."""

    task: Task.Config | None = None
    """The task: its data, its answers and its own rewards."""
    prompts: PromptStream.Config = field(default_factory=PromptStream.Config)
    """Prompts from examples: chat template, system prompt, length."""
    conversations: Conversations.Config = field(default_factory=Conversations.Config)
    """Turns, tools and environments."""
    in_flight: InFlight.Config = field(default_factory=InFlight.Config)
    """Groups whose sampling goes on over an update."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """The checks of the weights that the engine gets."""
    checkpoint: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    """When checkpoints are saved, and how many are kept."""
    metrics: Recorder.Config = field(default_factory=Recorder.Config)
    """Metrics, sample tables, sinks and the report."""
    watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)
    """Time limits for ranks that hang."""

    comm: Communication = field(default_factory=Communication)
    """Communication between ranks."""

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy, which reads a hint."""
        return bool(self.teacher_hint) and not self.teacher

    @property
    def truncates(self) -> bool:
        """Whether training samples from a part of the vocabulary, which the engine then records."""
        return any(
            sampling.truncates for sampling in (self.sampling, *self.task.samplings().values())
        )

    def needs_engine(self, algorithm: Algorithm) -> bool:
        """Whether training, with the objective that `algorithm` builds, or an evaluation samples."""
        evaluates = bool(self.evaluation.every or self.eval_only)
        return algorithm.policy_loss.from_engine or (
            evaluates and bool(self.evaluation.sampling.n or self.evaluation.sampled.n)
        )
