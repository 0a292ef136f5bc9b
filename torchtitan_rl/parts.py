"""The parts that a training loop calls, as build.py makes them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_rl import comm

if TYPE_CHECKING:
    from torchtitan.config import Configurable
    from transformers import PreTrainedTokenizerBase

    from torchtitan_rl.algorithm import Algorithm, Source
    from torchtitan_rl.data.stream import PromptStream
    from torchtitan_rl.generator.demonstrations import NoEngine
    from torchtitan_rl.generator.generator import Generator
    from torchtitan_rl.rewards import Grader
    from torchtitan_rl.rewards.workers import WorkerPool
    from torchtitan_rl.sync.weight_sync import WeightSync
    from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher
    from torchtitan_rl.trainer.trainer import Trainer
    from torchtitan_rl.types import Prompt


@dataclass(kw_only=True, eq=False)
class Parts:
    """The parts that a training loop calls. Every rank has its own and calls them in the same order."""

    config: "Configurable.Config"
    """The resolved `RunConfig`."""
    tokenizer: "PreTrainedTokenizerBase"
    prompts: "PromptStream"
    held_out: "list[Prompt]"
    """The prompts of evaluations, at least one."""
    grader: "Grader | None"
    """None with generators on ranks of their own, where completions are graded."""
    tool_workers: "WorkerPool | None"
    """Processes in which tools run; None without conversations."""
    algorithm: "Algorithm"
    trainer: "Trainer"
    sources: "list[Source]"
    """What scores episodes before `algorithm.credit.assign`: the reference, if the algorithm needs it, the teacher of a loss that
    reads its log-probabilities, and the loss's own."""
    teacher: "ExactTeacher | None"
    """From which the loss reads a divergence: the second argument of `trainer.update`."""
    generator: "Generator | NoEngine"
    weight_sync: "WeightSync | None"
    """Pushes the policy into the engine, which needs it before it samples; None without an engine."""

    def close(self) -> None:
        """Stop the workers of reward functions and tools and the engine, then the process group that it uses."""
        for workers in filter(None, (self.grader, self.tool_workers)):
            workers.close()
        self.generator.close()
        comm.close_process_group()
