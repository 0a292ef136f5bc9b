"""Held-out accuracy: the same prompts every time, judged like those of training (`ScoredCompletion.correct`)."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torchtitan.config import Configurable

from torchtitan_rl.generator import SamplingConfig


class EvaluationPass(NamedTuple):
    """One way of sampling the held-out prompts, and the names its results go by."""

    sampling: SamplingConfig
    prefix: str
    """Of its metrics and its sample table, such as "evaluation"."""
    split: str
    """Of its rows: eval_greedy or eval_sampled."""


class Evaluation(Configurable):
    """When to evaluate, on how many prompts, sampled how."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        every: int = 10
        """Steps between evaluations, besides one before the first step and one after the last; 0 never evaluates."""

        num_prompts: int = 256
        """How many held-out prompts: always the task's first."""

        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1, temperature=0.0))
        """Greedy by default."""

        sampled: SamplingConfig | None = None
        """A second pass, with temperature and n > 1, for mean@n and pass@k; its metrics are evaluation/sampled/...
        None: no second pass."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.passes = [_named(config.sampling, "evaluation")]
        if config.sampled is not None:
            self.passes.append(_named(config.sampled, "evaluation/sampled"))

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the policy is evaluated after `step` (0: before the first)."""
        every = self.config.every
        return bool(every) and (step % every == 0 or step == num_steps)


def _named(sampling: SamplingConfig, prefix: str) -> EvaluationPass:
    return EvaluationPass(sampling, prefix, "eval_greedy" if sampling.temperature == 0 else "eval_sampled")
