"""Held-out accuracy: the same prompts every time, sampled greedily, judged by the task that also rewards training."""

from dataclasses import dataclass, field

from torchtitan.config import Configurable

from torchtitan_rl.generator import SamplingConfig
from torchtitan_rl.tasks import Task
from torchtitan_rl.types import Episode


class Evaluation(Configurable):
    """When to evaluate, on how many prompts, and what counts as right."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        every: int = 10
        """Steps between evaluations, besides one before the first step and one after the last; 0 never evaluates."""

        num_prompts: int = 256
        """Held-out prompts."""

        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1, temperature=0.0))
        """Greedy by default; n > 1 with a temperature adds pass@n."""

    def __init__(self, config: Config, *, task: Task) -> None:
        self.config = config
        self.task = task

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the policy is evaluated after `step` (0: before the first)."""
        every = self.config.every
        return bool(every) and (step % every == 0 or step == num_steps)

    @property
    def split(self) -> str:
        """The name of its rows in sample tables: eval_greedy or eval_sampled."""
        return "eval_greedy" if self.config.sampling.temperature == 0 else "eval_sampled"

    def is_correct(self, episode: Episode) -> bool:
        """The task's own judgement, which also rewards training."""
        return self.task.is_correct(episode.answer, episode.expected_answer)
